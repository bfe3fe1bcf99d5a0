"""Importing a part of a trainer's package without the rest of it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def bare(top: str, *names: str) -> None:
    """Make packages importable without their `__init__`, which draws engines and CUDA. To be called
    in a process of its own.
    """
    found = find_spec(top)
    assert found is not None and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]).parent
    for name in (top, *names):
        module = ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = module


def run_apart(code: str) -> None:
    """Run `code` in a process of its own, with this one's search path."""
    paths = f"import sys; sys.path[:] = {sys.path!r}\nfrom support.bare import bare\n"
    subprocess.run([sys.executable, "-c", paths + code], check=True)
