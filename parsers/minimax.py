"""MiniMax M2 and dots: a block of `<invoke name="...">` with a `<parameter name="...">` for each argument."""

from __future__ import annotations

from dataclasses import replace

from toolroll.parsers.tags import Shape, TagParser

_MINIMAX = Shape(
    block=("<minimax:tool_call>", "</minimax:tool_call>"),
    call=('<invoke name="', "</invoke>"),
    name_end=('">',),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
)
_DOTS = replace(_MINIMAX, block=("<dots_function_call>", "</dots_function_call>"))


class MiniMaxM2Parser(TagParser):
    """See the module."""

    name = "minimax-m2"
    shape = _MINIMAX


class DotsParser(TagParser):
    """See the module."""

    name = "dots"
    shape = _DOTS
