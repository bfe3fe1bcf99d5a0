"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Also
InternLM's variant, and GigaChat 3, whose calls have no end marker.
"""

from __future__ import annotations

from toolroll.parsers.base import MarkedParser
from toolroll.parsers.formats.json_blocks import JsonBlockParser, open_json_calls
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.source import Source, Steps


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
