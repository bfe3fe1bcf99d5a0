"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`. Since Mistral Small 3.1,
the format is `[TOOL_CALLS]name[ARGS]{...}`. In some versions, `[CALL_ID]id` follows the name. Calls
have no end marker.
"""

from __future__ import annotations

from toolroll.parsers.base import Broken, MarkedParser
from toolroll.parsers.formats.blocks import json_arguments
from toolroll.parsers.formats.json_blocks import broken_open, open_json_calls
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import Names, made_call
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reasoning import get_reasoning

_OPENER, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(MarkedParser):
    """The format of Mistral, which the module describes."""

    name = "mistral"
    reasoning = get_reasoning("mistral")
    openers = (_OPENER,)
    markers = (_OPENER,)
    inner = (_ID, _ARGS)

    def read_marked(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        pos = yield from source.skip(start)
        if (yield from source.char(pos)) in ("[", "{") and not (
            yield from source.starts(pos, _OPENER)
        ):
            names = Names(call_id=("id",))
            return (yield from open_json_calls(source, out, begin, pos, self.openers, names))
        return (yield from self._named(source, out, begin, pos))

    def _named(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        pos, marker = yield from source.until(start, (_ID, _ARGS, "{", _OPENER))
        name, call_id = source.text[start:pos].strip(), ""
        if marker == _ID:
            first = pos + len(marker)
            pos, marker = yield from source.until(first, (_ARGS, "{", _OPENER))
            call_id = source.text[first:pos].strip()
        try:
            if marker in ("", _OPENER):
                problem = f"expected {_ARGS} and the arguments after the tool's name"
                raise Broken(problem, name[:100], incomplete=not marker)
            pos += len(marker) if marker == _ARGS else 0
            arguments, stop = yield from json_arguments(source, pos, name)
        except Broken as broken:
            call, stop = yield from broken_open(source, begin, start, broken, self.openers)
        else:
            call = made_call(name, arguments, source.text[start:stop], (begin, stop))
            call = call.with_id(call_id)
        out.call(call)
        return stop
