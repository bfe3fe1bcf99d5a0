"""Tagged formats: values by the schema, and calls that are not as they should be."""

from __future__ import annotations

from typing import Any

import pytest
from support.parsing import assert_same_in_pieces, tool

from toolroll.parsers.reading.values import typed
from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus

TOOLS = [tool("f", {"x": {"type": "string"}}), tool("g", {"y": {"type": "integer"}})]
SECOND = "<tool_call>\n<function=g>\n<parameter=y>\n2\n</parameter>\n</function>\n</tool_call>"


def test_a_value_that_is_not_closed_does_not_swallow_the_next_call() -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>\n{SECOND}"
    first, second = assert_same_in_pieces(
        get_parser("qwen3_coder"), text, tools=TOOLS, in_reasoning=False
    ).tool_calls
    assert (first.name, first.status) == ("f", CallStatus.INVALID_JSON)
    assert (second.arguments, second.status) == ({"y": 2}, CallStatus.OK)


def test_a_broken_call_in_a_block_does_not_hide_the_others() -> None:
    invoke = '<invoke name="g">\n<parameter name="y">2</parameter>\n</invoke>\n'
    text = (
        f"<minimax:tool_call>\n{invoke}<invoke "
        f'name="f">\n<what>\n</invoke>\n{invoke}</minimax:tool_call>Done.'
    )
    reply = assert_same_in_pieces(get_parser("minimax-m2"), text, tools=TOOLS, in_reasoning=False)
    assert [(call.name, call.status.value) for call in reply.tool_calls] == [
        ("g", "ok"),
        ("f", "invalid_json"),
        ("g", "ok"),
    ]
    assert reply.content == "Done."


def test_text_between_the_calls_of_a_block_is_content() -> None:
    invoke = '<invoke name="g">\n<parameter name="y">2</parameter>\n</invoke>\n'
    text = f"<minimax:tool_call>\n{invoke}and\n{invoke}</minimax:tool_call>"
    reply = assert_same_in_pieces(get_parser("minimax-m2"), text, tools=TOOLS, in_reasoning=False)
    assert (len(reply.ok_calls), reply.content) == (2, "and")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "string"}, "3"),
        ("3", {"type": "integer"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("3", {"type": "number"}, 3),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("x", {"type": ["integer", "string"]}, "x"),
        ("7", {"enum": ["7", 8]}, "7"),
        ("8", {"enum": ["7", 8]}, 8),
        ("[1, 'a']", {"type": "array"}, [1, "a"]),
        ('{"a": 1}', {"anyOf": [{"type": "object"}, {"type": "null"}]}, {"a": 1}),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ("x", {"type": "integer"}, "x"),
        ("2", {"type": "float"}, 2),
        ("2", {"$ref": "#/$defs/n"}, 2),
        ("1" * 5000, {"type": "integer"}, "1" * 5000),
        ("{" * 5000, None, "{" * 5000),
        ("NaN", None, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
    ],
)
def test_a_bare_value_is_read_by_its_schema(text: str, schema: Any, value: Any) -> None:
    found = typed(text, schema)
    assert found == value
    assert type(found) is type(value)
