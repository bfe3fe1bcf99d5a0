"""The error for an unknown parser."""

from __future__ import annotations


class UnknownParserError(ValueError):
    """No parser has this name or can read this template. The message lists the known names."""
