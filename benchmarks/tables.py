"""Tables in Markdown, and a description of the machine."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "transformers",
    "tokenizers",
    "aiohttp",
    "httpx",
    "orjson",
    "numpy",
    "strands-sglang",
    "renderers",
    "verl",
)


@dataclass
class Table:
    """A table with a title and header; cells are strings."""

    title: str
    head: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the table as Markdown."""
        lines = [f"## {self.title}", "", *self._rows(), ""]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)]).rstrip() + "\n"

    def _rows(self) -> list[str]:
        rule = "|" + "---|" * len(self.head)
        return [_row(self.head), rule, *(_row(row) for row in self.rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: float) -> str:
    """Return `value` with three significant digits, without exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def verdict(*, held: bool) -> str:
    """Return the text for a goal that was met or not."""
    return "held" if held else "**missed**"


def machine() -> str:
    """Return cores, processor, Python and package versions in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        model = found.group(1).strip() if found else model
    versions = [f"{name} {_version(name)}" for name in PACKAGES if _version(name)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores ({model}), Python {platform.python_version()}, {', '.join(versions)}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
