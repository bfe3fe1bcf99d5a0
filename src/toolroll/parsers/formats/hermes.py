"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Also
InternLM's variant.
"""

from __future__ import annotations

from toolroll.parsers.formats.json_blocks import JsonBlockParser


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
