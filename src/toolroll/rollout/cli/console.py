"""Print lines that contain names, paths and other text from outside."""

from __future__ import annotations

from rich.console import Console


def print_line(console: Console, line: str) -> None:
    """Print `line` unchanged, without markup, emoji names and line breaks of rich."""
    console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
