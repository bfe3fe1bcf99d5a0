"""K2 Horizon: `<ifm|tool_calls>` around `<ifm|tool_call>name`, with an `<ifm|arg_key>` and an
`<ifm|arg_value>` for each argument.

There are two variants: one has an `<ifm|arg_type>` between key and value, and one has JSON in place
of the name and the arguments.
"""

from __future__ import annotations

from toolroll.parsers.base import Broken
from toolroll.parsers.formats.blocks import json_arguments
from toolroll.parsers.formats.tags import Shape, TagParser
from toolroll.parsers.reading.json_text import json_calls
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reasoning import get_reasoning
from toolroll.parsers.types import ToolCall

_CLOSE = "</ifm|tool_call>"


class K2HorizonParser(TagParser):
    """The format of K2 Horizon, which the module describes. Each of the three reasoning efforts has
    its own think tags.
    """

    name = "k2_horizon"
    bare = True
    reasoning = get_reasoning("k2_horizon")
    shape = Shape(
        block=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        call=("<ifm|tool_call>", _CLOSE),
        name_end=("\n", "<ifm|arg_key>", _CLOSE),
        key=("<ifm|arg_key>", "</ifm|arg_key>"),
        kind=("<ifm|arg_type>", "</ifm|arg_type>"),
        value=("<ifm|arg_value>", "</ifm|arg_value>"),
    )

    def elements(self, source: Source, begin: int, start: int) -> Steps[tuple[list[ToolCall], int]]:
        pos = yield from source.skip(start)
        if (yield from source.char(pos)) not in ("{", "["):
            return (yield from super().elements(source, begin, start))
        try:
            value, end = yield from json_arguments(source, pos, "the tool call")
        except Broken as broken:
            raise Broken(str(broken)) from broken  # without a name, because the JSON contains it
        close = yield from source.skip(end)
        if not (yield from source.starts(close, _CLOSE, spelled=True)):
            raise Broken(f"the tool call is not closed with {_CLOSE} after its JSON")
        stop, raw = close + len(_CLOSE), source.text[pos:end]
        items = value if isinstance(value, list) and value else [value]
        functions = [
            item.get("function", item) if isinstance(item, dict) else item for item in items
        ]
        return json_calls(functions, raw, (begin, stop)), stop
