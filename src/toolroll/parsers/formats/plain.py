"""`PlainParser`: replies without a format for tool calls, where the server (or nobody) reads
those. Reasoning is taken apart.
"""

from __future__ import annotations

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.schema import Offered
from toolroll.parsers.reading.source import Source, Steps


class PlainParser(ToolCallParser):
    """All text after the reasoning is content."""

    name = "plain"

    def read_calls(
        self, source: Source, out: Collector, at: int, offered: Offered | None
    ) -> Steps[None]:
        """Nothing is a call."""
        while True:
            out.content(source.text[at:])
            at = len(source.text)
            if source.closed:
                return
            yield
