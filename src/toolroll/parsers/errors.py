"""What can be wrong with the name of a parser."""

from __future__ import annotations


class UnknownParserError(ValueError):
    """No parser has that name, or reads that template; the message says which there are."""
