"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`. Since Mistral Small 3.1,
the format is `[TOOL_CALLS]name[ARGS]{...}`. In some versions, `[CALL_ID]id` follows the name. Calls
have no end marker.
"""

from __future__ import annotations

from toolroll.parsers.formats.blocks import Broken, json_arguments
from toolroll.parsers.formats.json_blocks import OpenJsonParser, broken_open
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import Names, made_call, scan_json
from toolroll.parsers.reading.schema import Offered
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reasoning import Tags

_ID, _ARGS = "[CALL_ID]", "[ARGS]"


class MistralParser(OpenJsonParser):
    """See the module."""

    name = "mistral"
    opener = "[TOOL_CALLS]"
    names = Names(call_id=("id",))
    reasoning = Tags("[THINK]", "[/THINK]")
    openers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]",)

    def read_calls(
        self, source: Source, out: Collector, at: int, offered: Offered | None
    ) -> Steps[None]:
        """See `ToolCallParser.read_calls`."""
        while True:
            begin, marker = yield from source.until(at, (self.opener,), out.content)
            if not marker:
                return
            if out.calls_as_text:
                return out.begin_verbatim(begin)
            at = yield from source.skip(begin + len(marker))
            if (yield from source.char(at)) in ("[", "{") and not (
                yield from source.starts(at, self.opener)
            ):
                at = yield from self.json_calls(source, out, begin, at, (self.opener,))
            else:
                at = yield from self._named(source, out, begin, at)

    def _named(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        at, marker = yield from source.until(start, (_ID, _ARGS, "{", self.opener))
        name, call_id = source.text[start:at].strip(), ""
        if marker == _ID:
            first = at + len(marker)
            at, marker = yield from source.until(first, (_ARGS, "{", self.opener))
            call_id = source.text[first:at].strip()
        if not marker or marker == self.opener:
            problem = f"expected {_ARGS} and the arguments after the tool's name"
            call, stop = yield from broken_open(
                source,
                begin,
                start,
                problem,
                (self.opener,),
                incomplete=not marker,
                name=name[:100],
            )
            out.call(call)
            return stop
        at += len(marker) if marker == _ARGS else 0
        try:
            arguments, stop = yield from json_arguments(source, at, name)
        except Broken as broken:
            scanned = yield from scan_json(source, (yield from source.skip(at)))
            call, stop = yield from broken_open(
                source,
                begin,
                start,
                str(broken),
                (self.opener,),
                incomplete=scanned.incomplete,
                name=name,
            )
            out.call(call)
            return stop
        out.call(
            made_call(name, arguments, source.text[start:stop], (begin, stop)).with_id(call_id)
        )
        return stop
