"""Llama 3.1 to 3.3: the whole reply is `{"name": ..., "parameters": {...}}`, or several of them
separated by `;`, sometimes after `<|python_tag|>`.

An object that follows neither `<|python_tag|>` nor `;` is a call only if it has the key `name`, and
also `parameters`, `arguments` or no other key. If its JSON is unreadable, it is a call if the key
`name` occurs near its start. Otherwise the object is text.
"""

from __future__ import annotations

import re

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.formats.json_blocks import open_json_calls
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import Unreadable, decode, scan_json
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reasoning import SAID

_TAG = "<|python_tag|>"
_MEANT = re.compile(r"""["']name["']\s*:""")


class Llama3Parser(ToolCallParser):
    """The format of Llama 3.1 to 3.3, which the module describes."""

    name = "llama3"
    reasoning = SAID
    openers = (_TAG,)
    markers = (_TAG, ";")

    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        if out.calls_as_text:
            return out.begin_verbatim(pos)
        first = yield from source.skip(pos)
        if (yield from source.char(first)) == "{" and (yield from self._is_call(source, first)):
            pos = yield from self.read_marked(source, out, first, first)
        while True:
            begin, marker = yield from source.until(pos, (_TAG,), out.content)
            if not marker:
                return
            pos = yield from self.read_marked(source, out, begin, begin + len(marker))

    def read_marked(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        """Add the calls at `start`, one after another. Return the position after them."""
        pos = start
        while True:
            pos = yield from open_json_calls(source, out, begin, pos, (_TAG,))
            behind = yield from source.skip(pos)
            semicolon = yield from source.starts(behind, ";")
            begin = yield from source.skip(behind + len(semicolon))
            if (yield from source.char(begin)) != "{" or not (
                semicolon or (yield from self._is_call(source, begin))
            ):
                return begin if semicolon else pos
            pos = begin

    def _is_call(self, source: Source, pos: int) -> Steps[bool]:
        """Return True if the JSON object at `pos`, which may be incomplete, is a call."""
        try:
            stop = yield from scan_json(source, pos)
        except Unreadable:
            end = yield from source.rest()
            return _MEANT.search(source.text, pos, min(end, pos + 200)) is not None
        try:
            value = decode(source.text[pos:stop])
        except ValueError:
            return True
        return (
            isinstance(value, dict)
            and "name" in value
            and ("parameters" in value or "arguments" in value or len(value) == 1)
        )
