"""Cohere's Command: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters":
{...}}]<|END_ACTION|>`, with text in a separate block. Also Apertus, whose list has one object
`{name: arguments}` per call.
"""

from __future__ import annotations

from typing import Any

from toolroll.parsers.formats.json_blocks import JsonBlockParser
from toolroll.parsers.reading.json_text import Names, made_call
from toolroll.parsers.reasoning import get_reasoning
from toolroll.parsers.types import Span, ToolCall


class CohereParser(JsonBlockParser):
    """The format of Cohere's Command, which the module describes."""

    name = "cohere_command4"
    opener = "<|START_ACTION|>"
    closer = "<|END_ACTION|>"
    names = Names(
        name=("tool_name", "name"), arguments=("parameters", "arguments"), call_id=("tool_call_id",)
    )
    reasoning = get_reasoning("cohere_command4")
    wrappers = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


class ApertusParser(JsonBlockParser):
    """The format of Apertus, which the module describes."""

    name = "apertus2509"
    opener = "<|tools_prefix|>"
    closer = "<|tools_suffix|>"
    reasoning = get_reasoning("apertus2509")

    def calls_in(self, value: Any, raw: str, span: Span) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for item in value if isinstance(value, list) and value else [value]:
            if isinstance(item, dict) and item:
                calls += [made_call(name, arguments, raw, span) for name, arguments in item.items()]
            else:
                calls.append(made_call("", {}, raw, span))
        return calls
