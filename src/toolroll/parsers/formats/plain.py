"""`PlainParser`: a parser for replies without tool calls in their text. Use it if the server parses
the calls itself, or if the model makes no calls. Reasoning is still separated.
"""

from __future__ import annotations

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.source import Source, Steps


class PlainParser(ToolCallParser):
    """All text after the reasoning is content."""

    name = "plain"

    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        """Read all text as content."""
        while True:
            out.content(source.text[pos:])
            pos = len(source.text)
            if source.closed:
                return
            yield
