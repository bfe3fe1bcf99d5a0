"""Kimi K2 and DeepSeek V3, R1 and V3.1: calls that consist of a name, a separator, and the
arguments as JSON.
"""

from __future__ import annotations

import re

from toolroll.parsers.formats.blocks import NamedJsonParser

_HEADER = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?", re.DOTALL)


class KimiK2Parser(NamedJsonParser):
    """Kimi K2 and K2.5: a section of calls
    `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`. The
    header `functions.name:0` is the call's id.
    """

    name = "kimi_k2"
    block = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    separator = "<|tool_call_argument_begin|>"
    inner = (separator,)
    bare = True

    def name_of(self, header: str) -> tuple[str, str]:
        """A header that is only a number has no name."""
        match = _HEADER.fullmatch(header)
        name = match["name"] if match is not None else header
        return ("" if name.isdigit() else name), header


class DeepSeekV31Parser(NamedJsonParser):
    """DeepSeek V3.1: `name<｜tool▁sep｜>` and JSON."""

    name = "deepseekv31"
    block = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    separator = "<｜tool▁sep｜>"
    inner = (separator,)


class DeepSeekV3Parser(DeepSeekV31Parser):
    """DeepSeek V3 and R1: `function<｜tool▁sep｜>name` and a fenced JSON block."""

    name = "deepseekv3"
    fence = ("```json", "```")
