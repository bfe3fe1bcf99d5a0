"""`SharedTools`: equal tools are one object, which nothing outside changes."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import pytest

from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus
from toolroll.rollout.template.snapshot import SharedTools
from toolroll.rollout.types import Tool


def tool(**schema: Any) -> Tool:
    parameters = {"type": "object", "properties": {"size": schema}, "required": ["size"]}
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


def test_equal_tools_are_one_object() -> None:
    assert SharedTools.of([tool(const=1)]) is SharedTools.of((deepcopy(tool(const=1)),))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"const": 1}, {"const": True}),
        ({"const": 1}, {"const": 1.0}),
        ({"const": 0.0}, {"const": -0.0}),
        ({"enum": ["a"]}, {"enum": ("a",)}),
        ({"type": "string", "title": "t"}, {"title": "t", "type": "string"}),
        ({"const": "1"}, {"const": 1}),
        ({"examples": {1: 2}}, {"examples": {"1": 2}}),
    ],
)
def test_tools_that_may_render_differently_are_not(one: Any, other: Any) -> None:
    """`==` and JSON text do not tell all of them apart."""
    lists = [SharedTools.of([tool(**schema)]) for schema in (one, other)]
    assert [repr(each.tools) for each in lists] == [repr([tool(**one)]), repr([tool(**other)])]


def test_a_change_of_what_came_in_or_went_out_changes_no_list() -> None:
    mine = [tool(type="integer")]
    held = SharedTools.of(mine)
    for tools in (mine, held.copy()):
        tools[0]["function"]["parameters"]["properties"]["size"]["type"] = "string"
        tools.append(tool())
    assert held.tools == [tool(type="integer")] == SharedTools.of([tool(type="integer")]).copy()
    text = '<tool_call>\n{"name": "look", "arguments": {"size": "large"}}\n</tool_call>'
    [call] = get_parser("hermes").parse(text, tools=held.offered).tool_calls
    assert call.status is CallStatus.BAD_ARGUMENTS


def test_tools_of_other_classes_are_kept_but_not_shared() -> None:
    mine = [OrderedDict(tool(const="\ud800"))]
    held = SharedTools.of(mine)
    assert held is not SharedTools.of(mine)
    assert held.copy() == [tool(const="\ufffd")]


def test_the_size_counts_the_text() -> None:
    assert SharedTools.of([tool()]).size == len("function" + "look" + "object" + "size")
