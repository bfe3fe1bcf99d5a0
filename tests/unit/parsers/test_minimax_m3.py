"""MiniMax M3's elements in elements, read by the schema level by level."""

from __future__ import annotations

from typing import Any

import pytest
from support.parsing import assert_same_in_pieces, tool

from toolroll.parsers.registry import get_parser

M = "]<]minimax[>["
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "name": {"type": "string"}}}
SCHEMAS: dict[str, Any] = {
    "points": {"type": "array", "items": POINT},
    "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
    "tags": {"type": "object", "additionalProperties": {"type": "string"}},
    "item": {"type": "object", "properties": {"item": {"type": "string"}}},
    "limit": {"type": ["integer", "null"]},
    "note": {"type": "string"},
}


def element(key: str, *inner: str) -> str:
    return f"{M}<{key}>{''.join(inner)}{M}</{key}>"


def items(*inner: str) -> list[str]:
    return [element("item", text) for text in inner]


ITEM = {"item": {"item": "1"}}
POINTS = element("points", *items(element("x", "1") + element("name", "2")))


def written(inner: str, name: str = "f") -> str:
    return f'{M}<tool_call>\n{M}<invoke name="{name}">{inner}{M}</invoke>\n{M}</tool_call>'


def arguments(inner: str, *, tools: bool = True) -> Any:
    parser = get_parser("minimax-m3")
    reply = assert_same_in_pieces(
        parser, written(inner), tools=[tool("f", SCHEMAS)] if tools else None, in_reasoning=False
    )
    (call,) = reply.tool_calls
    return call.arguments if call.ok else call.status.value


@pytest.mark.parametrize(
    ("inner", "found"),
    [
        (POINTS, {"points": [{"x": 1, "name": "2"}]}),
        (element("pair", *items("7", "7")), {"pair": ["7", 7]}),
        (element("tags", element("a", "1"), element("b", "2")), {"tags": {"a": "1", "b": "2"}}),
        (element("item", *items("1")), ITEM),
        (element("points", ""), {"points": []}),
        (element("tags", " \n"), {"tags": {}}),
        (element("note", ""), {"note": ""}),
        (element("note", " <b>1</b>\n"), {"note": " <b>1</b>\n"}),
        (element("note", f"{M} is a token"), {"note": f"{M} is a token"}),
        (element("limit", "null"), {"limit": None}),
        (element("points", '[{"x": 1}]'), {"points": [{"x": 1}]}),
        (element("note", element("b", "1")), "bad_arguments"),
        (element("limit", "many"), "bad_arguments"),
    ],
)
def test_the_schema_says_what_an_element_is(inner: str, found: Any) -> None:
    assert arguments(inner) == found


@pytest.mark.parametrize(
    ("inner", "found"),
    [
        (element("a", *items("1", "x")), {"a": [1, "x"]}),
        (element("a", *items("1"), element("b", "x")), {"a": {"item": 1, "b": "x"}}),
        (element("a", "1") + element("a", "2") + element("a", "3"), {"a": [1, 2, 3]}),
        (element("a", ""), {"a": ""}),
        (element("a", "x" + element("b", "1")), "invalid_json"),
        (element("a", element("b", "1") + "x"), "invalid_json"),
        (f"{M}<a>1{M}</b>", "invalid_json"),
        (f"{M}</a>", "invalid_json"),
        (f"{M}<a b{M}</a>", "invalid_json"),
        (f"{M}<a>" * 120 + f"{M}</a>" * 120, "invalid_json"),
    ],
)
def test_without_a_schema_elements_say_it_themselves(inner: str, found: Any) -> None:
    assert arguments(inner, tools=False) == found


@pytest.mark.parametrize(
    ("text", "opened", "reasoning"), [("", False, None), ("", None, None), ("Hm.", True, "Hm.")]
)
def test_a_reply_without_reasoning_may_begin_by_closing_it(
    text: str, opened: bool | None, reasoning: str | None
) -> None:
    text = f"{text}</mm:think>Hello.{written('')}"
    reply = assert_same_in_pieces(get_parser("minimax-m3"), text, in_reasoning=opened)
    assert (reply.content, reply.reasoning, len(reply.ok_calls)) == ("Hello.", reasoning, 1)
