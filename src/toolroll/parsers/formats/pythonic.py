"""Calls in Python syntax: Llama 4's `[f(a=1), g(b="x")]` and LFM2's
`<|tool_call_start|>[f(a=1)]<|tool_call_end|>`.

Llama 4 writes calls without markers, so the position decides what counts as a list of calls. A list
at the start of a line counts even if it is unreadable. A list within a line counts only if it names
an offered tool. If no tools are given, it counts only if it is readable.
"""

from __future__ import annotations

import re
from dataclasses import replace

from toolroll.parsers.base import Broken, MarkedParser, ToolCallParser, broken_call, unclosed
from toolroll.parsers.formats.blocks import json_arguments
from toolroll.parsers.formats.json_blocks import broken_open
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import Unreadable, json_calls
from toolroll.parsers.reading.python_text import read_call, read_name
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reasoning import SAID
from toolroll.parsers.types import ToolCall

_START, _END = "<|python_start|>", "<|python_end|>"
_LFM_START, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME = r"[^\W\d][\w.\-/]*+"
_TEXT = rf"[^\[<]++|\[(?!\s*+(?:\Z|{_NAME}\s*+(?:\(|\Z)))|<(?!\|p|\|?\Z)"
_NO_CALL = re.compile(f"(?:{_TEXT})*+")
"""Matches text that contains no list of calls and no marker, and that does not end with the start
of either.
"""
_IN_LINE = r"(?:(?<=\S)|(?<=\S[^\S\n]))"
_NO_ARGUMENT = r"""[=(,'"\[\]{}]|[^\s*=(),'"\[\]{}][^\s=(),'"\[\]{}]*+\s*+[^\s=]"""
_NO_CALL_IN_PROSE = re.compile(
    rf"(?:{_TEXT}|{_IN_LINE}\[\s*+{_NAME}\((?=[^\S\n]*+(?:{_NO_ARGUMENT})))*+"
)
"""Like `_NO_CALL`, but also matches a list within a line if the text after its parenthesis cannot
start an argument. A line break there is not matched, because a call may follow on the next line.
"""
_CALLED = re.compile(r"\s*\[?\s*([^\W\d][\w.\-/]*)\s*\(")


class PythonicParser(ToolCallParser):
    """The format of Llama 4, which the module describes."""

    name = "pythonic"
    reasoning = SAID
    markers = (_START, _END)

    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        if out.calls_as_text:
            return out.begin_verbatim(pos)
        marked, fresh = False, True  # after the marker; at the start of a line
        while True:
            begin, marker = yield from source.until(pos, ("[", _START, _END), out.content)
            if not marker:
                return
            _, line, last = source.text[pos:begin].rpartition("\n")
            fresh = not last.strip() and (fresh or bool(line))
            if marker != "[":
                pos, marked = begin + len(marker), marker == _START
                continue
            pos = yield from self._list(source, out, begin, alone=marked or fresh)
            # Text with one bracket that is not a call often has more of them. Skip them all at
            # once.
            no_call = _NO_CALL_IN_PROSE if source.offered is None else _NO_CALL
            skipped = no_call.match(source.text, pos)
            stop = skipped.end() if skipped is not None else pos
            out.content(source.text[pos:stop])
            _, line, last = source.text[pos:stop].rpartition("\n")
            pos, marked, fresh = stop, False, bool(line) and not last.strip()

    def _list(self, source: Source, out: Collector, begin: int, *, alone: bool) -> Steps[int]:
        """Add the calls of the list at `begin`. If it is not a list of calls, add only its bracket
        as text.

        Return the position after the added text. `alone`: True if the list is at the start of a
        line or after the start marker.
        """
        first = yield from source.skip(begin + 1)
        name = yield from read_name(source, first)
        meant = alone or source.offered is None or name in source.offered.functions
        if meant and name and (yield from source.char(first + len(name))) == "(":
            try:
                calls, stop = yield from read_calls_list(source, begin)
            except Unreadable as error:
                # This is prose. Skip the text that was read, so that the total time stays linear.
                if not alone and source.offered is None:
                    stop = max(error.pos, begin + 1)
                    out.content(source.text[begin:stop])
                    return stop
                problem = f"the call of {name} cannot be read: {error}"
                broken = Broken(problem, name, incomplete=error.incomplete)
                call, stop = yield from broken_open(source, begin, begin, broken, (_END,))
                calls = [call]
            for call in calls:
                out.call(call)
            return stop
        out.content("[")
        return begin + 1


def read_calls_list(source: Source, begin: int) -> Steps[tuple[list[ToolCall], int]]:
    """Return the calls in the list at `begin`, and the end of the list. Each call's span is the
    whole list. Raises `Unreadable`.
    """
    calls: list[ToolCall] = []
    pos = yield from source.skip(begin + 1)
    while True:
        name, arguments, stop = yield from read_call(source, pos)
        calls.append(ToolCall(name, arguments, source.text[pos:stop]))
        pos = yield from source.skip(stop)
        char = yield from source.char(pos)
        if char == ",":
            pos = yield from source.skip(pos + 1)
            char = yield from source.char(pos)
        elif char != "]":
            raise Unreadable(
                pos,
                "expected ',' or ']' after a call"
                if char
                else "the text ends inside the list of calls",
                incomplete=not char,
            )
        if char == "]":
            return [replace(call, span=(begin, pos + 1)) for call in calls], pos + 1


class Lfm2Parser(MarkedParser):
    """LFM2: a call or a list of calls between two markers. JSON calls are read too."""

    name = "lfm2"
    openers = (_LFM_START,)
    markers = (_LFM_START, _LFM_END)

    def read_marked(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        try:
            calls, pos = yield from self._calls(source, start)
        except (Unreadable, Broken) as error:
            broken = Broken(f"the tool call cannot be read: {error}")
            call, pos = yield from broken_call(
                source, begin, start, broken, closes=(_LFM_END,), openers=(_LFM_START,)
            )
            out.call(call if call.name else replace(call, name=_name_in(call.raw)))
            return pos
        behind = yield from source.skip(pos)
        closer = yield from source.starts(behind, _LFM_END, spelled=True)
        pos = behind + len(closer)
        for call in calls:
            spanned = replace(call, span=(begin, pos))
            out.call(spanned if closer else unclosed(spanned, _LFM_END))
        return pos

    def _calls(self, source: Source, start: int) -> Steps[tuple[list[ToolCall], int]]:
        """Return the calls after the marker, and their end. Raises `Unreadable` or `Broken`."""
        pos = yield from source.skip(start)
        first = (yield from source.skip(pos + 1)) if (yield from source.char(pos)) == "[" else pos
        if (yield from source.char(first)) == "{":
            value, stop = yield from json_arguments(source, pos, "the tool")
            calls = json_calls(value, source.text[pos:stop], (pos, stop))
        elif first > pos:
            calls, stop = yield from read_calls_list(source, pos)
        else:
            name, arguments, stop = yield from read_call(source, pos)
            calls = [ToolCall(name, arguments, source.text[pos:stop])]
        behind = yield from source.skip(stop)
        if not (
            yield from source.starts(behind, _LFM_END, _LFM_START, spelled=True)
        ) and behind < len(source.text):
            raise Unreadable(behind, f"expected {_LFM_END} directly after the calls")
        return calls, stop


def _name_in(raw: str) -> str:
    match = _CALLED.match(raw[:300])
    return match[1] if match is not None else ""
