"""Print text that rich must not interpret, such as names, paths and error messages."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

_MOST_LINES = 5


def print_line(console: Console, line: str) -> None:
    """Print `line` unchanged. rich does not interpret markup or emoji names, or wrap the line."""
    console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def shortened(lines: Sequence[str]) -> list[str]:
    """Return the first of `lines`, and the number of the others."""
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], *([f"... and {more} more such lines"] if more > 0 else [])]
