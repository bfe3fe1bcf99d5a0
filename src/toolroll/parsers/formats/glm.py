"""GLM 4.5 to 5, Ling 3, Laguna, Spark 2.5 and IQuest Q1: `<tool_call>name` with an `<arg_key>` and
an `<arg_value>` for each argument. Also Hunyuan 3, which adds a block around the calls.
"""

from __future__ import annotations

from dataclasses import replace

from toolroll.parsers.formats.tags import Shape, TagParser

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
