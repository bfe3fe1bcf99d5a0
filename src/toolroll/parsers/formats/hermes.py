"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Also
other formats of JSON between markers: InternLM, Cohere's Command and Apertus. Also GigaChat 3,
whose calls have no end marker.
"""

from __future__ import annotations

from typing import Any

from toolroll.parsers.base import MarkedParser
from toolroll.parsers.formats.json_blocks import JsonBlockParser, open_json_calls
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import Members, Names, made_call
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reasoning import get_reasoning
from toolroll.parsers.types import Span, ToolCall


class HermesParser(JsonBlockParser):
    """The format of Hermes, Qwen 2.5 and Qwen 3, which the module describes."""

    name = "hermes"
    aliases = ("qwen", "qwen25", "trinity")
    opener = "<tool_call>"
    closer = "</tool_call>"


class InternParser(JsonBlockParser):
    """InternLM 2 and Intern-S1: `<|action_start|> <|plugin|>{"name": ..., "parameters":
    {...}}<|action_end|>`.
    """

    name = "interns1"
    opener = "<|action_start|> <|plugin|>"
    closer = "<|action_end|>"


class CohereParser(JsonBlockParser):
    """Cohere's Command: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters":
    {...}}]<|END_ACTION|>`, with text in a separate block.
    """

    name = "cohere_command4"
    opener = "<|START_ACTION|>"
    closer = "<|END_ACTION|>"
    names = Names(
        name=("tool_name", "name"), arguments=("parameters", "arguments"), call_id=("tool_call_id",)
    )
    reasoning = get_reasoning("cohere_command4")
    wrappers = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


class ApertusParser(JsonBlockParser):
    """Apertus: a list with one object `{name: arguments}` per call."""

    name = "apertus2509"
    opener = "<|tools_prefix|>"
    closer = "<|tools_suffix|>"
    reasoning = get_reasoning("apertus2509")

    def calls_in(self, value: Any, raw: str, span: Span) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for item in value if isinstance(value, list) and value else [value]:
            if isinstance(item, dict) and item and not isinstance(item, Members):
                calls += [made_call(name, arguments, raw, span) for name, arguments in item.items()]
            else:
                calls.append(made_call("", {}, raw, span))
        return calls


_OPENERS = ("<|function_call|>", "function call<|role_sep|>\n")
_SEPARATOR = "<|message_sep|>"


class GigaChat3Parser(MarkedParser):
    """GigaChat 3: `<|function_call|>{"name": ..., "arguments": {...}}`, or the same JSON after
    `function call<|role_sep|>`.
    """

    name = "gigachat3"
    openers = _OPENERS
    wrappers = (_SEPARATOR,)
    markers = (*_OPENERS, _SEPARATOR)

    def read_marked(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        return (yield from open_json_calls(source, out, begin, start, self.markers))
