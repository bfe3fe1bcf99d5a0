"""Kimi K2 and K2.5: a section of calls
`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`. The header
`functions.name:0` is the call's id.
"""

from __future__ import annotations

import re

from toolroll.parsers.formats.blocks import NamedJsonParser

_HEADER = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?", re.DOTALL)


class KimiK2Parser(NamedJsonParser):
    """The format of Kimi K2 and K2.5, which the module describes."""

    name = "kimi_k2"
    block = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    separator = "<|tool_call_argument_begin|>"
    bare = True

    def name_of(self, header: str) -> tuple[str, str]:
        """A header that is only a number has no name."""
        match = _HEADER.fullmatch(header)
        name = match["name"] if match is not None else header
        return ("" if name.isdigit() else name), header
