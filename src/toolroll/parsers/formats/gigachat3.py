"""GigaChat 3: `<|function_call|>{"name": ..., "arguments": {...}}`, or the same JSON after
`function call<|role_sep|>`. Calls have no end marker.
"""

from __future__ import annotations

from toolroll.parsers.base import MarkedParser
from toolroll.parsers.formats.json_blocks import open_json_calls
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.source import Source, Steps

_OPENERS = ("<|function_call|>", "function call<|role_sep|>\n")
_SEPARATOR = "<|message_sep|>"


class GigaChat3Parser(MarkedParser):
    """The format of GigaChat 3, which the module describes."""

    name = "gigachat3"
    openers = _OPENERS
    wrappers = (_SEPARATOR,)
    markers = (*_OPENERS, _SEPARATOR)

    def read_marked(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        return (yield from open_json_calls(source, out, begin, start, self.markers))
