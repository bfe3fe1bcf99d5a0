"""`SGLangParser`: a parser that calls SGLang's own tool-call parser (`sglang:NAME`).

Invariant: a call that SGLang's parser drops is kept as a call with an error status. This library's
parser of the same format finds the dropped calls. If this library has no parser of the format, only
replies in which SGLang finds no call are checked: if SGLang dropped a part of such a reply, the
whole reply is kept as one unreadable call.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import made_call
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.types import CallStatus, ToolCall, UnknownParserError

_FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


class SGLangParser(ToolCallParser):
    """A parser that calls SGLang's tool-call parser `sglang_name`.

    `ours` is this library's parser of the same format, or None. It provides the reasoning tags and
    the markers, and finds calls that SGLang's parser drops.

    Raises `UnknownParserError` if SGLang is not installed or has no parser of this name.
    """

    def __init__(
        self,
        sglang_name: str,
        control_tokens: Collection[str] = (),
        *,
        ours: ToolCallParser | None = None,
    ) -> None:
        super().__init__(control_tokens)
        try:
            from sglang.srt.entrypoints.openai.protocol import Tool
            from sglang.srt.function_call.function_call_parser import FunctionCallParser
        except ImportError as error:
            problem = (
                f"sglang:{sglang_name} needs SGLang, which cannot be imported in this "
                f"environment: {error}"
            )
            raise UnknownParserError(problem) from error
        if sglang_name not in FunctionCallParser.ToolCallParserEnum:
            names = ", ".join(FunctionCallParser.ToolCallParserEnum)
            raise UnknownParserError(
                f"SGLang has no tool-call parser named {sglang_name!r}; it has {names}"
            )
        self.sglang_name = sglang_name
        self._tool, self._parser = Tool, FunctionCallParser
        self._own = ours
        if ours is not None:
            self.reasoning, self.openers = ours.reasoning, ours.openers
            self.markers, self.inner = ours.markers, ours.inner

    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        """Nothing is added before the end of the text, because SGLang's parser gets the whole text
        at once.
        """
        if out.calls_as_text:
            return out.begin_verbatim(pos)
        yield from source.rest()
        text = source.text[pos:]
        tools = [
            {"type": "function", "function": dict(function)}
            for function in (source.offered.functions if source.offered else {}).values()
        ]
        try:
            parser = self._parser([self._tool(**tool) for tool in tools], self.sglang_name)
            content, items = parser.parse_non_stream(text)
        except _FAILURES as error:
            out.call(_unread(text, pos, f"SGLang's parser {self.sglang_name} failed: {error}"))
            return
        out.content(content)
        calls = [_call(item) for item in items]
        for call in calls:
            out.call(call)
        for call in self._dropped(text, content, calls, pos, tools):
            out.call(call)

    def _dropped(
        self, text: str, content: str, calls: list[ToolCall], pos: int, tools: list[dict[str, Any]]
    ) -> list[ToolCall]:
        """Return the calls that SGLang's parser returned neither in `calls` nor in `content`."""
        problem = f"SGLang's parser {self.sglang_name} dropped this"
        if self._own is None:
            lost = not calls and len("".join(content.split())) < len("".join(text.split()))
            return [_unread(text, pos, problem)] if lost else []
        seen = [(call.name, call.arguments) for call in calls]
        dropped = []
        for call in self._own.parse(text, tools=tools or None, in_reasoning=False).tool_calls:
            if (call.name, call.arguments) in seen:
                seen.remove((call.name, call.arguments))
            elif call.raw.strip() not in content:
                status = CallStatus.INVALID_JSON if call.ok else call.status
                span = (call.span[0] + pos, call.span[1] + pos) if call.span is not None else None
                error = f"{problem}: {call.error}" if call.error else problem
                dropped.append(
                    ToolCall(call.name, call.arguments, call.raw, status, error, call.id, span)
                )
        return dropped


def _unread(text: str, pos: int, problem: str) -> ToolCall:
    """Return the `text` at `pos` as one unreadable call."""
    return ToolCall("", None, text, CallStatus.INVALID_JSON, problem, span=(pos, pos + len(text)))


def _call(item: Any) -> ToolCall:
    """Convert SGLang's `ToolCallItem` to a `ToolCall`."""
    name, raw = item.name or "", str(item.parameters)
    try:
        arguments = json.loads(raw)
    except ValueError:
        problem = "the arguments are not valid JSON"
        return ToolCall(name, None, raw, CallStatus.INVALID_JSON, problem)
    return replace(made_call(name, arguments, raw, (0, 0)), span=None)
