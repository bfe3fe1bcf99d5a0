"""Import packages when they are first needed."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

_NOTICES = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def import_transformers() -> ModuleType:
    """Import `transformers`, which takes 1 to 2 seconds.

    Suppress the notice that it prints if PyTorch is missing, because only its tokenizers are used
    here.
    """
    if "transformers" in sys.modules:
        return sys.modules["transformers"]
    before = os.environ.get(_NOTICES)
    os.environ[_NOTICES] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        if before is None:
            del os.environ[_NOTICES]
        else:
            os.environ[_NOTICES] = before
