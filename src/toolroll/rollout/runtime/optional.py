"""Packages that are imported when they are first needed."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

_NOTICES = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def import_transformers() -> ModuleType:
    """Import `transformers`, which takes 1 to 2 seconds.

    It prints a notice if PyTorch is missing. Only its tokenizers are used here, so the notice is
    left out.
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
