"""GigaChat 3: `<|function_call|>{"name": ..., "arguments": {...}}`, or the same JSON after
`function call<|role_sep|>`. Calls have no end marker.
"""

from __future__ import annotations

from toolroll.parsers.formats.json_blocks import OpenJsonParser
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.schema import Offered
from toolroll.parsers.reading.source import Source, Steps

_OPENERS = ("<|function_call|>", "function call<|role_sep|>\n")
_SEPARATOR = "<|message_sep|>"


class GigaChat3Parser(OpenJsonParser):
    """See the module."""

    name = "gigachat3"
    openers = _OPENERS
    markers = (*_OPENERS, _SEPARATOR)

    def read_calls(
        self, source: Source, out: Collector, at: int, offered: Offered | None
    ) -> Steps[None]:
        """See `ToolCallParser.read_calls`."""
        while True:
            begin, marker = yield from source.until(at, self.markers, out.content)
            if not marker:
                return
            at = begin + len(marker)
            if marker != _SEPARATOR:
                if out.calls_as_text:
                    return out.begin_verbatim(begin)
                at = yield from self.json_calls(source, out, begin, at, self.markers)
