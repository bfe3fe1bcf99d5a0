"""The error for an unknown parser."""

from __future__ import annotations


class UnknownParserError(ValueError):
    """No parser has that name or can read that template. The message lists the known names."""
