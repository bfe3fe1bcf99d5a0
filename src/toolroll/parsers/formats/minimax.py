"""MiniMax M2 and dots: a block of `<invoke name="...">` with a `<parameter name="...">` for each
argument. Also MiniCPM 5, which has `<function name=...>` and `<param name=...>` without a block.
"""

from __future__ import annotations

import html
from dataclasses import replace

from toolroll.parsers.formats.tags import Shape, TagParser

_MINIMAX = Shape(
    block=("<minimax:tool_call>", "</minimax:tool_call>"),
    call=('<invoke name="', "</invoke>"),
    name_end=('">',),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
)


def _unwrapped(text: str) -> str:
    """Return the content of `text` if it is a CDATA section. Otherwise return `text` with HTML
    escapes decoded.
    """
    bare = text.strip()
    if bare.startswith("<![CDATA[") and bare.endswith("]]>"):
        return bare[9:-3]
    return html.unescape(text)


class MiniMaxM2Parser(TagParser):
    """The format of MiniMax M2, which the module describes."""

    name = "minimax-m2"
    shape = _MINIMAX


class DotsParser(TagParser):
    """The format of dots, which the module describes."""

    name = "dots"
    shape = replace(_MINIMAX, block=("<dots_function_call>", "</dots_function_call>"))


class MiniCPM5Parser(TagParser):
    """The format of MiniCPM 5, which the module describes."""

    name = "minicpm5"
    shape = Shape(
        block=None,
        call=('<function name="', "</function>"),
        name_end=('">',),
        key=('<param name="', '">'),
        value=("", "</param>"),
        unescape=_unwrapped,
    )
