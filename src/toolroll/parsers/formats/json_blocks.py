"""The base classes of formats that write calls as JSON: one or several objects, or a list of
objects, between two markers or after one marker.

Invariants: text between blocks is content. Text inside a JSON string is not a marker, unless it is
a control token.
"""

from __future__ import annotations

from typing import Any, ClassVar

from toolroll.parsers.base import ToolCallParser, broken_call, never_closed, unclosed
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import Names, call_of, decode, name_in, scan_json
from toolroll.parsers.reading.schema import Offered
from toolroll.parsers.reading.source import Source, Span, Steps
from toolroll.parsers.types import CallStatus, ToolCall


class JsonBlockParser(ToolCallParser):
    """A parser for JSON between `opener` and `closer`.

    Attributes:
        names: The keys that hold the name, the arguments and the id in a call object.
        wrappers: The markers around visible text.
        ends: The stop tokens that also end a block. They may be in the text, or may already be
            removed from its end.
        bounds: The markers that start another message. An unclosed block ends before them.
    """

    opener: ClassVar[str]
    closer: ClassVar[str]
    names: ClassVar[Names] = Names()
    wrappers: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    bounds: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.openers = (cls.opener,)
        cls.markers = (cls.opener, cls.closer, *cls.wrappers)

    def calls_in(self, value: Any, raw: str, span: Span) -> list[ToolCall]:
        """Return the calls that the decoded `value` represents."""
        return [
            call_of(one, raw, span, self.names)
            for one in (value if isinstance(value, list) and value else [value])
        ]

    def read_calls(
        self, source: Source, out: Collector, at: int, offered: Offered | None
    ) -> Steps[None]:
        """See `ToolCallParser.read_calls`."""
        while True:
            begin, marker = yield from source.until(at, (self.opener, *self.wrappers), out.content)
            if not marker:
                return
            at = begin + len(marker)
            if marker == self.opener:
                if out.calls_as_text:
                    return out.begin_verbatim(begin)
                at = yield from self._block(source, out, begin, at)

    def _block(
        self, source: Source, out: Collector, begin: int, start: int, name: str = ""
    ) -> Steps[int]:
        """Add the calls of the block. Its opener is at `begin`, and its JSON is at `start`.

        Return where the text continues. `name`: the tool's name if it precedes the opener.
        """
        at = start
        # a fast path for many openers in a row
        if source.text.startswith(self.opener, at) and source.is_control_token(self.opener, at):
            out.call(never_closed(name, "", (begin, at), self.closer))
            return at
        found: list[tuple[Any, int, int]] = []
        while True:
            at = yield from source.skip(at)
            char = yield from source.char(at)
            if found and char not in ("{", "["):
                break
            scanned = yield from scan_json(source, at)
            problem = scanned.problem
            if problem is None:
                try:
                    found.append((decode(source.text[at : scanned.stop]), at, scanned.stop))
                except ValueError as error:
                    problem = str(error)
            if problem is not None:
                problem += f" (character {scanned.stop - start} of the call)"
                return (yield from self._broken(source, out, begin, start, problem, name))
            at = scanned.stop
        # After the JSON, a closer counts even if it is ordinary text, because no other text may
        # follow.
        closes = yield from source.starts(at, self.closer, *self.ends, spelled=True)
        if closes:
            stop = at + len(closes)
        elif at == len(source.text) or (yield from source.starts(at, self.opener, *self.bounds)):
            stop = at
        else:
            problem = f"text follows the JSON object at character {at - start}"
            return (yield from self._broken(source, out, begin, start, problem, name))
        calls = [
            call
            for value, first, last in found
            for call in self.calls_in(value, source.text[first:last], (begin, stop))
        ]
        for call in calls:
            out.call(
                call
                if closes or (self.ends and at == len(source.text))
                else unclosed(call, self.closer)
            )
        return stop

    def _broken(
        self, source: Source, out: Collector, begin: int, start: int, problem: str, name: str
    ) -> Steps[int]:
        error = f"the tool call is not valid JSON: {problem}"
        closes, openers = (self.closer, *self.ends), (self.opener, *self.bounds)
        call, stop = yield from broken_call(
            source, begin, start, error, closes=closes, openers=openers, name=name
        )
        out.call(call)
        return stop


class OpenJsonParser(ToolCallParser):
    """A parser for JSON after a marker (`opener`), without an end marker. A call ends where its
    JSON ends.
    """

    opener: ClassVar[str]
    names: ClassVar[Names] = Names()

    def json_calls(
        self, source: Source, out: Collector, begin: int, at: int, stops: tuple[str, ...]
    ) -> Steps[int]:
        """Add the calls of the JSON value at `at`, whose marker is at `begin`.

        Return where the text continues: after the value, or at the next of `stops` if the value
        cannot be read.
        """
        at = yield from source.skip(at)
        scanned = yield from scan_json(source, at)
        problem = scanned.problem
        if problem is None:
            raw, span = source.text[at : scanned.stop], (begin, scanned.stop)
            try:
                value = decode(raw)
            except ValueError as error:
                problem = str(error)
            else:
                for one in value if isinstance(value, list) and value else [value]:
                    out.call(call_of(one, raw, span, self.names))
                return scanned.stop
        words = (
            f"the tool call is not valid JSON: {problem} (character {scanned.stop - at} of the "
            f"call)"
        )
        call, stop = yield from broken_open(
            source, begin, at, words, stops, incomplete=scanned.incomplete
        )
        out.call(call)
        return stop


def broken_open(
    source: Source,
    begin: int,
    start: int,
    problem: str,
    stops: tuple[str, ...],
    *,
    incomplete: bool,
    name: str = "",
) -> Steps[tuple[ToolCall, int]]:
    """Return an unreadable call of a format without end markers, and the call's end.

    The call ends before the next of `stops`, or at the end of the text. `incomplete`: the text
    ended inside the call.
    """
    stop, _ = yield from source.until(start, stops)
    raw = source.text[start:stop]
    status = CallStatus.UNCLOSED if incomplete else CallStatus.INVALID_JSON
    error = f"the reply ended inside the tool call: {problem}" if incomplete else problem
    return ToolCall(name or name_in(raw), None, raw, status, error, span=(begin, stop)), stop
