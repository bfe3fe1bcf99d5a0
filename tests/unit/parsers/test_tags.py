"""Tagged formats: values by the schema, and calls that are not as they should be."""

from __future__ import annotations

from typing import Any

import pytest
from support.parsing import assert_same_in_pieces, tool

from toolroll.parsers.reading.resolve import Schema
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
        # a text that may be a string stays text
        ("7", {"type": ["integer", "string"]}, "7"),
        ("true", {"anyOf": [{"type": "boolean"}, {"type": "string"}]}, "true"),
        ("[1]", {"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1]"),
        ("7", {"type": ["integer", "string"], "enum": [7, "a"]}, 7),
        ("2", {"anyOf": [{"const": "1"}, {"type": "integer"}]}, 2),
        ("2", {"anyOf": [{"const": "1"}, {"type": "null"}]}, "2"),
        ("2", {"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]}, "2"),
        ("2.0", {"type": ["integer", "string"]}, "2.0"),
        ("7", {"anyOf": [{}, {"type": "string"}]}, 7),
        ("7", False, 7),
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
    found = typed(text, None if schema is None else Schema.of(schema, valid=True))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("a\n", "a\n"),  # in one line with its tag, a value has no line breaks of the format
        ("a", "a"),
        ("\na\n", "a"),
        ("\na\n\n", "a\n"),
        ("\n\na\n", "\na"),
        ("\n\n", ""),
        ("\na", "a"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "step3p5", "nanbeige"])
def test_only_the_line_breaks_of_the_form_with_lines_are_removed(
    name: str, written: str, value: str
) -> None:
    text = f"<tool_call><function=f><parameter=x>{written}</parameter></function></tool_call>"
    (call,) = assert_same_in_pieces(
        get_parser(name), text, tools=TOOLS, in_reasoning=False
    ).tool_calls
    assert (call.arguments, call.error) == ({"x": value}, None)


TAGGED = (
    "<tool_call>\n<function=f>\n<parameter=x>\nClose with </think> please.\n</parameter>\n"
    "</function>\n</tool_call>"
)
IN_CALLS = {
    "qwen3_coder": TAGGED,
    "glm45": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>Close with </think> please."
    "</arg_value>\n</tool_call>",
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": "Close with </think> please."}}'
    "</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">Close with </think> '
    "please.</parameter>\n</invoke>\n</minimax:tool_call>",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"x": "Close with </think> please."}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "llama3": '<|python_tag|>{"name": "f", "parameters": {"x": "Close with </think> please."}}',
    "lfm2": "<|tool_call_start|>[f(x='Close with </think> please.')]<|tool_call_end|>",
}


@pytest.mark.parametrize("name", IN_CALLS)
def test_a_closing_tag_in_a_call_does_not_close_reasoning(name: str) -> None:
    parser, call = get_parser(name), IN_CALLS[name]
    arguments = {"x": "Close with </think> please."}

    def read(text: str) -> Any:
        return assert_same_in_pieces(parser, text, tools=TOOLS, in_reasoning=True)

    for text in (f"I write it now.\n{call}", f"I write it now.</think>\n{call}"):
        reply = read(text)
        assert (reply.reasoning, reply.content) == ("I write it now.", "")
        assert [found.arguments for found in reply.ok_calls] == [arguments], reply.bad_calls
    # a call that is written before the tag that closes the reasoning is a part of it
    quoted = read(f"Should I write {call}? No.</think>Hello.")
    assert (quoted.reasoning, quoted.content) == (f"Should I write {call}? No.", "Hello.")
    assert quoted.tool_calls == ()
    # a marker alone is no call
    opener = parser.openers[0]
    named = read(f"I know {opener} well.</think>Hello.")
    assert (named.reasoning, named.content) == (f"I know {opener} well.", "Hello.")
