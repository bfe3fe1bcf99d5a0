"""Read calls that a format writes as JSON: one or several objects, or a list of objects.
`JsonBlockParser` is for formats with markers around the JSON. `open_json_calls` is for formats
without an end marker.

Invariants: text between blocks is content. Text inside a JSON string is not a marker, unless it is
a control token.
"""

from __future__ import annotations

from typing import Any, ClassVar

from toolroll.parsers.base import Broken, MarkedParser, broken_call, never_closed, unclosed
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import (
    DEFAULT_NAMES,
    Names,
    Unreadable,
    json_calls,
    name_in,
    read_json,
)
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.types import CallStatus, Span, ToolCall


class JsonBlockParser(MarkedParser):
    """A parser for JSON between `opener` and `closer`.

    Attributes:
        names: The keys that hold the name, the arguments and the id in a call object.
        ends: The stop tokens that also end a block. The stop token at the end of a reply may be
            missing in its text.
        bounds: The markers that start another message. An unclosed block ends before the first.
    """

    opener: ClassVar[str]
    closer: ClassVar[str]
    names: ClassVar[Names] = DEFAULT_NAMES
    ends: ClassVar[tuple[str, ...]] = ()
    bounds: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.openers = (cls.opener,)
        cls.markers = (cls.opener, cls.closer, *cls.wrappers)

    def calls_in(self, value: Any, raw: str, span: Span) -> list[ToolCall]:
        """Return the calls that the decoded `value` represents."""
        return json_calls(value, raw, span, self.names)

    def read_marked(
        self,
        source: Source,
        out: Collector,
        begin: int,
        start: int,
        name: str = "",
    ) -> Steps[int]:
        """Add the calls. `name`: the tool's name if it precedes the opener."""
        # a fast path for many openers in a row
        if source.text.startswith(self.opener, start) and source.is_control_token(
            self.opener, start
        ):
            out.call(never_closed(name, "", (begin, start), self.closer))
            return start
        pos = start
        values: list[tuple[Any, int, int]] = []
        while True:
            pos = yield from source.skip(pos)
            char = yield from source.char(pos)
            if values and char not in ("{", "["):
                break
            try:
                value, stop = yield from read_json(source, pos)
            except Unreadable as error:
                problem = f"{error} (character {error.pos - start} of the call)"
                return (yield from self._broken(source, out, begin, start, problem, name))
            values.append((value, pos, stop))
            pos = stop
        # After the JSON, a closer counts even if it is ordinary text, because no other text may
        # follow.
        closes = yield from source.starts(pos, self.closer, *self.ends, spelled=True)
        if closes:
            stop = pos + len(closes)
        elif pos == len(source.text) or (yield from source.starts(pos, self.opener, *self.bounds)):
            stop = pos
        else:
            problem = f"text follows the JSON object at character {pos - start}"
            return (yield from self._broken(source, out, begin, start, problem, name))
        closed = closes or (self.ends and pos == len(source.text))
        for value, first, last in values:
            for call in self.calls_in(value, source.text[first:last], (begin, stop)):
                out.call(call if closed else unclosed(call, self.closer))
        return stop

    def _broken(
        self, source: Source, out: Collector, begin: int, start: int, problem: str, name: str
    ) -> Steps[int]:
        broken = Broken(f"the tool call is not valid JSON: {problem}", name)
        closes, openers = (self.closer, *self.ends), (self.opener, *self.bounds)
        call, stop = yield from broken_call(
            source, begin, start, broken, closes=closes, openers=openers
        )
        out.call(call)
        return stop


def open_json_calls(
    source: Source,
    out: Collector,
    begin: int,
    pos: int,
    stops: tuple[str, ...],
    names: Names = DEFAULT_NAMES,
) -> Steps[int]:
    """Add the calls in the JSON value at `pos`. The value has a start marker at `begin`, but no end
    marker.

    Return the position after the value. If the value cannot be read, return the position of the
    next of `stops`.
    """
    pos = yield from source.skip(pos)
    try:
        value, stop = yield from read_json(source, pos)
    except Unreadable as error:
        character = error.pos - pos
        problem = f"the tool call is not valid JSON: {error} (character {character} of the call)"
        broken = Broken(problem, incomplete=error.incomplete)
        call, stop = yield from broken_open(source, begin, pos, broken, stops)
        out.call(call)
        return stop
    for call in json_calls(value, source.text[pos:stop], (begin, stop), names):
        out.call(call)
    return stop


def broken_open(
    source: Source, begin: int, start: int, broken: Broken, stops: tuple[str, ...]
) -> Steps[tuple[ToolCall, int]]:
    """Return an unreadable call of a format without end markers, and the call's end.

    The call ends before the next of `stops`, or at the end of the text.
    """
    stop, _ = yield from source.until(start, stops)
    raw, error, status = source.text[start:stop], str(broken), CallStatus.INVALID_JSON
    if broken.incomplete:
        error, status = f"the reply ended inside the tool call: {error}", CallStatus.UNCLOSED
    name = broken.name or name_in(raw)
    return ToolCall(name, None, raw, status, error, span=(begin, stop)), stop
