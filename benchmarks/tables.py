"""Tables in Markdown, required ratios, figures for docs/speed.md, and a description of the
machine.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
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
_FIGURE = re.compile(r"<!--([\w.-]+)-->(.*?)<!--/-->")


@dataclass(frozen=True)
class Required:
    """A ratio with a limit: at least `limit` if `least` is set, else at most."""

    text: str
    ratio: float
    limit: float
    least: bool = False

    @property
    def held(self) -> bool:
        """True if the ratio is within its limit."""
        return self.ratio >= self.limit if self.least else self.ratio <= self.limit


@dataclass
class Table:
    """A table with a title and header; cells are strings. `figures` are what docs/speed.md
    and docs/audit.md state, by name.
    """

    title: str
    head: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    required: list[Required] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """Return the table as Markdown."""
        rule = "|" + "---|" * len(self.head)
        lines = [f"## {self.title}", "", _row(self.head), rule, *map(_row, self.rows), ""]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)]).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def verdicts(runs: Sequence[Sequence[Required]]) -> Table:
    """Tabulate the required ratios of each run."""
    table = Table("Required ratios", ["required", "measured", "held"])
    for each in zip(*runs, strict=True):
        sign = "at least" if each[0].least else "at most"
        held = sum(required.held for required in each)
        table.rows.append(
            [
                f"{each[0].text}: {sign} {each[0].limit:g}",
                spread([required.ratio for required in each]),
                f"{held} of {len(each)}" if held == len(each) else f"**{held} of {len(each)}**",
            ]
        )
    return table


def number(amount: float) -> str:
    """Return `amount` with three significant digits, without exponent."""
    if amount >= 100:
        return f"{amount:,.0f}"
    return f"{amount:.1f}" if amount >= 10 else f"{amount:.2f}"


def spread(amounts: Sequence[float]) -> str:
    """Return the smallest and the largest amount, or one if they read the same."""
    low, high = number(min(amounts)), number(max(amounts))
    return low if low == high else f"{low} to {high}"


def with_figures(page: str, figures: Mapping[str, Sequence[float]]) -> str:
    """Return `page` with the measured range in each `<!--NAME-->...<!--/-->` that was measured."""

    def filled(mark: re.Match[str]) -> str:
        name = mark.group(1)
        text = spread(figures[name]) if name in figures else mark.group(2)
        return f"<!--{name}-->{text}<!--/-->"

    return _FIGURE.sub(filled, page)


def named_figures(page: str) -> set[str]:
    """Return the names of the figures in `page`."""
    return {mark.group(1) for mark in _FIGURE.finditer(page)}


def machine() -> str:
    """Return cores, processor, Python and package versions in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        line = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        model = line.group(1).strip() if line else model
    versions = [f"{name} {_version(name)}" for name in PACKAGES if _version(name)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores ({model}), Python {platform.python_version()}, {', '.join(versions)}"


def load() -> str:
    """Return the machine's load average of the last minute."""
    return f"load average {os.getloadavg()[0]:.1f}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
