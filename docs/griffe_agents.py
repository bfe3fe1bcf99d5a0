"""A griffe extension that finds `toolroll.agents`.

griffe expects an `__init__.py` in a package inside a package. `toolroll.agents` has none
(docs/architecture.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe


class AgentsPackage(griffe.Extension):
    """Adds the module `toolroll.agents` before its submodules are read."""

    def on_module_instance(self, *, mod: griffe.Module, **_: Any) -> None:
        """Add `toolroll.agents` if `mod` is `toolroll`. griffe calls this for each module."""
        if mod.path == "toolroll" and isinstance(mod.filepath, Path):
            folder = mod.filepath.parent / "agents"
            mod.set_member("agents", griffe.Module("agents", filepath=[folder], parent=mod))
