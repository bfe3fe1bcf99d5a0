"""The error for an unknown parser."""

from __future__ import annotations


class UnknownParserError(ValueError):
    """No parser has this name, or no parser can read the calls that this chat template renders."""
