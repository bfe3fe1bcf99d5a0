"""Hermes and Qwen 2.5/3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
from typing import Any

from toolroll.parsers.base import Source, ToolCallParser
from toolroll.parsers.types import CallStatus, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


class HermesParser(ToolCallParser):
    """One or several JSON objects in each block; text between blocks is content."""

    name = "hermes"
    aliases = ("qwen", "qwen25")

    def scan(self, source: Source, begin: int) -> tuple[str, list[ToolCall]]:
        """See `ToolCallParser.scan`."""
        text = source.text
        content: list[str] = []
        calls: list[ToolCall] = []
        at = begin
        while (opener := source.find(OPEN, at)) >= 0:
            content.append(text[at:opener])
            found, at = self._block(source, opener)
            calls += found
        content.append(text[at:])
        return "".join(content).strip() if calls else text[begin:].strip(), calls

    def _block(self, source: Source, opener: int) -> tuple[list[ToolCall], int]:
        """The calls of the block at `opener`, and where the text goes on."""
        text = source.text
        start = opener + len(OPEN)
        objects, end, problem = _objects(text, start)
        if problem is None:
            closes = text.startswith(CLOSE, end)  # behind the JSON, a spelled-out closer is one too: it can be nothing else
            stop = end + len(CLOSE) if closes else len(text)
            if closes or end == len(text):
                span = (opener, stop)
                status = CallStatus.OK if closes else CallStatus.UNCLOSED
                return [_call(value, raw, span, status) for value, raw in objects], stop
            problem = f"text follows the JSON object at character {end - start}"
        close = source.find(CLOSE, start)
        if close < 0:
            raw = text[start:]
            error = "the reply ended inside the tool call: it is not closed with </tool_call>"
            return [ToolCall(_name_in(raw), None, raw, CallStatus.UNCLOSED, error, span=(opener, len(text)))], len(text)
        raw = text[start:close]
        stop = close + len(CLOSE)
        error = f"the tool call is not valid JSON: {problem}"
        return [ToolCall(_name_in(raw), None, raw, CallStatus.INVALID_JSON, error, span=(opener, stop))], stop


def _objects(text: str, at: int) -> tuple[list[tuple[Any, str]], int, str | None]:
    """The JSON values from `at` on, each with its text; where they end, white space included; and why reading stopped there
    (None: at something that is no JSON value's beginning, after at least one)."""
    found: list[tuple[Any, str]] = []
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if found and (at == len(text) or text[at] != "{"):
            return found, at, None
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return found, at, str(error) or type(error).__name__
        found.append((value, text[at:end]))
        at = end


def _call(value: Any, raw: str, span: tuple[int, int], status: CallStatus) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall("", None, raw, CallStatus.INVALID_JSON, "the tool call must be a JSON object", span=span)
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return ToolCall(str(name or ""), None, raw, CallStatus.INVALID_JSON, "arguments must be a JSON object", span=span)
    if not isinstance(name, str) or not name:
        fitting = arguments if isinstance(arguments, dict) else None
        return ToolCall("", fitting, raw, CallStatus.MISSING_NAME, 'the tool call has no "name"', span=span)
    if not isinstance(arguments, dict):
        error = f"the arguments of {name} must be a JSON object, not {type(arguments).__name__}"
        return ToolCall(name, None, raw, CallStatus.BAD_ARGUMENTS, error, span=span)
    if status is CallStatus.UNCLOSED:
        return ToolCall(name, arguments, raw, status, "the tool call is not closed with </tool_call>", span=span)
    return ToolCall(name, arguments, raw, span=span)


def _name_in(raw: str) -> str:
    """The name in a call that cannot be read, for its answer; "" where even that is not there."""
    _, found, rest = raw.partition('"name"')
    parts = rest.split('"', 2)
    return parts[1] if found and len(parts) == 3 and parts[0].strip() == ":" and len(parts[1]) < 100 else ""
