"""Qwen3-Coder, Qwen3.5, Nemotron 3 and Step 3.5: `<tool_call>` around `<function=name>` with a
`<parameter=key>` for each argument. Also MiMo, which writes the values with HTML escapes.
`formats/tags.py` reads them.
"""

from __future__ import annotations

import html
from dataclasses import replace

from toolroll.parsers.formats.tags import Shape, TagParser

_SHAPE = Shape(
    block=("<tool_call>", "</tool_call>"),
    call=("<function=", "</function>"),
    name_end=(">",),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    trim_newline=True,
)


class Qwen3CoderParser(TagParser):
    """The format of Qwen3-Coder, Qwen3.5, Nemotron 3 and Step 3.5, which the module describes."""

    name = "qwen3_coder"
    aliases = ("step3p5", "nanbeige")
    shape = _SHAPE


class MiMoParser(TagParser):
    """The format of MiMo, which the module describes."""

    name = "mimo"
    shape = replace(_SHAPE, trim_newline=False, unescape=html.unescape)
