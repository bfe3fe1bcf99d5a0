"""Beam: messages as in harmony, but each argument of a call is an XML-like element.

A call starts with ` to=name<|channel|>analysis <|constrain|>xml<|message|>`. Each argument is
`<rfl:parameter name="key">`, then the value on lines of its own, then `</rfl:parameter>`.

The prompt ends with `<|start|>assistant`. The line break before a closing tag belongs to the tag.
The closing tag may be missing if another parameter follows. Source: SGLang 0.5.23 (beam).
"""

from __future__ import annotations

from typing import Any

from toolroll.parsers.base import Broken
from toolroll.parsers.formats.harmony import ENDS, HarmonyParser, header_forms
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import made_call
from toolroll.parsers.reading.schema import parameter
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reading.values import typed
from toolroll.parsers.types import CallStatus, Span, ToolCall

_OPEN, _KEY_END, _CLOSE = '<rfl:parameter name="', '">', "\n</rfl:parameter>"
_NEXT = f"\n{_OPEN}"
_BOUNDS = (*ENDS, "<|start|>")


class BeamParser(HarmonyParser):
    """The format of Beam, which the module describes."""

    name = "beam"
    markers, plain = header_forms("xml")

    def call(self, source: Source, out: Collector, header: Span, name: str) -> Steps[int]:
        arguments: dict[str, Any] = {}
        begin, pos = header
        body = pos
        try:
            while True:
                pos = yield from source.skip(pos)
                marker = yield from source.starts(pos, _OPEN, *_BOUNDS)
                if marker != _OPEN:
                    break
                pos = yield from self._parameter(source, pos + len(marker), name, arguments)
            if not marker and pos < len(source.text):
                raise Broken(f"expected {_OPEN} or the end of the call of {name}")
        except Broken as broken:
            stop, marker = yield from source.until(pos, _BOUNDS)
            status = CallStatus.INVALID_JSON if marker else CallStatus.UNCLOSED
            end = stop + len(marker) if marker in ENDS else stop
            out.call(
                ToolCall(name, None, source.text[body:stop], status, str(broken), span=(begin, end))
            )
            return end
        end = pos + len(marker) if marker in ENDS else pos
        out.call(made_call(name, arguments, source.text[body:pos], (begin, end)))
        return end

    def _parameter(
        self, source: Source, start: int, name: str, arguments: dict[str, Any]
    ) -> Steps[int]:
        """Add the parameter whose key is at `start` to `arguments`. Return where it ends. Raises
        `Broken` if it cannot be read.
        """
        pos, marker = yield from source.until(start, (_KEY_END, "\n", *_BOUNDS))
        key = source.text[start:pos]
        if marker != _KEY_END or not key:
            raise Broken(f"a parameter's name in the call of {name} is not closed with {_KEY_END}")
        first = pos = pos + len(marker)
        while True:
            pos, marker = yield from source.until(pos, (_CLOSE, _NEXT, *_BOUNDS))
            if marker not in (_CLOSE, _NEXT):
                raise Broken(f"the parameter {key} of {name} is not closed with {_CLOSE.strip()}")
            stop = pos + len(marker) if marker == _CLOSE else pos
            # This line break follows the start tag, so it does not end the value: values start on
            # the next line.
            if marker == _NEXT and pos == first:
                pos += 1
                continue
            if marker == _NEXT or source.exact(_CLOSE):
                break
            behind = yield from source.skip(stop)
            if (yield from source.starts(behind, _OPEN, *_BOUNDS)) or behind == len(source.text):
                break
            pos = stop
        text = source.text[first:pos].removeprefix("\n")
        arguments[key] = typed(text, parameter(source.offered, name, key))
        return stop
