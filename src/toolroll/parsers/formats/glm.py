"""GLM 4.5 to 5, Ling 3, Laguna, Spark 2.5 and IQuest Q1: `<tool_call>name` with an `<arg_key>` and
an `<arg_value>` for each argument. Also Hunyuan 3, which adds a block around the calls, and K2
Horizon, which adds a block and `ifm|` before the name of each tag.
"""

from __future__ import annotations

from dataclasses import replace

from toolroll.parsers.base import Broken
from toolroll.parsers.formats.blocks import json_arguments
from toolroll.parsers.formats.tags import Shape, TagParser
from toolroll.parsers.reading.json_text import json_calls
from toolroll.parsers.reading.source import Source, Steps
from toolroll.parsers.reasoning import get_reasoning
from toolroll.parsers.types import ToolCall

_GLM = Shape(
    block=None,
    call=("<tool_call>", "</tool_call>"),
    name_end=("\n", "<arg_key>", "</tool_call>"),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)


class Glm45Parser(TagParser):
    """The format of GLM 4.5 to 5, Ling 3, Laguna and Spark 2.5, which the module describes. The
    line break after the name is optional: GLM 4.5 and 4.6 write it, and GLM 4.7 and 5 do not.
    """

    name = "glm45"
    aliases = ("glm", "glm47", "ling3", "poolside_v1", "spark25")
    shape = _GLM


class IQuestParser(TagParser):
    """IQuest Q1: arguments as in GLM, but `<iquest_tool_call>` around each call."""

    name = "iquest_q1"
    shape = replace(
        _GLM,
        call=("<iquest_tool_call>", "</iquest_tool_call>"),
        name_end=("\n", "<arg_key>", "</iquest_tool_call>"),
    )


class HunyuanParser(TagParser):
    """The format of Hunyuan 3, which the module describes."""

    name = "hunyuan"
    shape = replace(
        _GLM,
        block=("<tool_calls>", "</tool_calls>"),
        name_end=("<tool_sep>", "\n", "<arg_key>", "</tool_call>"),
    )


_CLOSE = "</ifm|tool_call>"


class K2HorizonParser(TagParser):
    """K2 Horizon: `<ifm|tool_calls>` around calls as in GLM. There are two variants: one has an
    `<ifm|arg_type>` between key and value, and one has JSON in place of the name and the arguments.
    Each of the three reasoning efforts has its own think tags.
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
