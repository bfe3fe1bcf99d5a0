"""A griffe extension that finds `toolroll.agents`.

That package has no `__init__` (ADR 1), which griffe expects of a package within a package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe


class AgentsPackage(griffe.Extension):
    """Adds the module `toolroll.agents` before its submodules are read."""

    def on_module_instance(self, *, mod: griffe.Module, **_: Any) -> None:
        """Called for every module."""
        if mod.path == "toolroll" and isinstance(mod.filepath, Path):
            folder = mod.filepath.parent / "agents"
            mod.set_member("agents", griffe.Module("agents", filepath=[folder], parent=mod))
