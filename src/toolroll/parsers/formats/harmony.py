"""harmony (gpt-oss): messages with a header and a body,
`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`.

The prompt ends with `<|start|>assistant`, so a reply starts inside a header. The analysis channel
is reasoning, a message to a recipient is a call, and every other message is content. Source: the
published guide to the format, and gpt-oss's chat template.

Beam has the same messages, but each argument of a call is an XML-like element. A call starts with
` to=name<|channel|>analysis <|constrain|>xml<|message|>`. Each argument is `<rfl:parameter
name="key">`, then the value on lines of its own, then `</rfl:parameter>`. The line break before a
closing tag belongs to the tag. The closing tag may be missing if another parameter follows. Source:
SGLang 0.5.23 (beam).
"""

from __future__ import annotations

import re
from typing import Any

from toolroll.parsers.base import Broken, ToolCallParser
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import Members, Unreadable, decode, made_call, scan_json
from toolroll.parsers.reading.schema import parameter
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reading.values import value_by_schema
from toolroll.parsers.types import CallStatus, Span, ToolCall

_HEAD = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNELS = ("analysis", "commentary", "final")
_ROLES = ("assistant", "user", "system", "developer")
"""Recipients that are not tools, unless a tool of that name was offered."""
_MARKS = re.compile("|".join(map(re.escape, _HEAD)))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def header_forms(word: str) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Return the format's markers, and a pattern that matches headers without a recipient.

    `word` names the format of a call's arguments in the header, such as `json`.
    """
    parts = (
        *(f"<|channel|>{channel}" for channel in _CHANNELS),
        "<|message|>",
        f"<|constrain|>{word}",
        f"{word}<|message|>",
    )
    markers = (
        *(role + part for role in ("", "assistant") for part in parts),
        "<|start|>assistant",
        *_HEAD,
        *ENDS,
    )
    channel = rf"<\|channel\|>\s*(?:{'|'.join(_CHANNELS)})"
    start = r"(?:<\|start\|>)?\s*(?:assistant)?\s*"
    header = rf"{start}(?:{channel})?\s*(?:(?:<\|constrain\|>)?\s*{word})?\s*"
    return tuple(dict.fromkeys(markers)), re.compile(header)


class HarmonyParser(ToolCallParser):
    """The format of gpt-oss, which the module describes."""

    name = "gpt-oss"
    reasoning = None
    beside = (("to=",), ())
    markers, plain = header_forms("json")

    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        while True:
            begin = yield from source.skip(pos)
            if not (yield from source.starts(begin, "to=", "assistant", *_HEAD)):
                pos, marker = yield from source.until(pos, (*_HEAD, *ENDS), out.content)
                if not marker:
                    return
                if marker in ENDS:
                    pos += len(marker)
                    continue
                begin = pos
            pos = yield from self._message(source, out, begin)

    def _message(self, source: Source, out: Collector, begin: int) -> Steps[int]:
        """Add the message whose header is at `begin`. Return the position after the message."""
        stop, marker = yield from source.until(begin, ("<|message|>", *ENDS))
        header = source.text[begin:stop]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        body = stop + len("<|message|>")
        name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        offers = source.offered is not None and name in source.offered.functions
        if recipient is not None and (offers or recipient[1] not in _ROLES):
            if marker == "<|message|>":
                return (yield from self.call(source, out, (begin, body), name))
            status = CallStatus.INVALID_JSON if marker else CallStatus.UNCLOSED
            problem = f"the call of {name} has no <|message|> with arguments"
            out.call(ToolCall(name, None, header, status, problem, span=(begin, stop)))
            return stop
        if marker != "<|message|>":  # a truncated header, or text that only looked like one
            out.content(_MARKS.sub("", header))
            return stop
        plain = len(header) < 200 and self.plain.fullmatch(header) is not None
        if channel is None or channel[1] != "analysis" or not plain:
            out.content("\n" if plain else f"{_MARKS.sub('', header)}\n")
            pos, marker = yield from source.until(body, (*ENDS, "<|start|>"), out.content)
        else:
            out.reasoning("\n")
            pos, marker = yield from source.until(body, (*ENDS, "<|start|>"), out.reasoning)
            if not marker:
                out.reasoning_closed = False
        return pos + len(marker) if marker in ENDS else pos

    def call(self, source: Source, out: Collector, header: Span, name: str) -> Steps[int]:
        """Add the call of `name`, whose arguments follow the `header`. Return the position after
        the call.
        """
        begin, body = header
        pos = yield from source.skip(body)
        try:
            if (yield from source.starts(pos, *ENDS)):
                stop = pos
            else:
                stop = yield from scan_json(source, pos)
            behind = yield from source.skip(stop)
            marker = yield from source.starts(behind, *ENDS, "<|start|>")
            if not marker and behind < len(source.text):
                raise Unreadable(behind, "text follows the arguments")
        except Unreadable as problem:
            stop, marker = yield from source.until(pos, (*ENDS, "<|start|>"))
            unclosed = problem.incomplete and not marker
            status = CallStatus.UNCLOSED if unclosed else CallStatus.INVALID_JSON
            end = stop + len(marker) if marker in ENDS else stop
            error = f"the arguments of {name} are not valid JSON: {problem}"
            out.call(ToolCall(name, None, source.text[body:stop], status, error, span=(begin, end)))
            return end
        end = behind + len(marker) if marker in ENDS else behind
        out.call(_decoded(name, source.text[body:stop], (begin, end)))
        return end


def _decoded(name: str, raw: str, span: Span) -> ToolCall:
    try:
        arguments = decode(raw) if raw.strip() else {}
    except ValueError as error:
        problem = f"the arguments of {name} are not valid JSON: {error}"
        return ToolCall(name, None, raw, CallStatus.INVALID_JSON, problem, span=span)
    return made_call(name, arguments, raw, span)


_OPEN, _KEY_END, _CLOSE = '<rfl:parameter name="', '">', "\n</rfl:parameter>"
_NEXT = f"\n{_OPEN}"
_BOUNDS = (*ENDS, "<|start|>")


class BeamParser(HarmonyParser):
    """The format of Beam, which the module describes."""

    name = "beam"
    markers, plain = header_forms("xml")
    inner = (_OPEN, _CLOSE)

    def call(self, source: Source, out: Collector, header: Span, name: str) -> Steps[int]:
        arguments = Members()
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
        out.call(made_call(name, arguments.plain(), source.text[body:pos], (begin, end)))
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
        arguments[key] = value_by_schema(text, parameter(source.offered, name, key))
        return stop
