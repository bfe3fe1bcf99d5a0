"""Print text that rich must not interpret, such as names, paths and error messages."""

from __future__ import annotations

from rich.console import Console


def print_line(console: Console, line: str) -> None:
    """Print `line` unchanged. rich does not interpret markup or emoji names, or wrap the line."""
    console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
