"""Tagged formats: values by the schema, and calls that are not as they should be."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from support.formats import written
from support.parsing import assert_same_in_pieces, tool

from toolroll.parsers.formats.tags import TagParser
from toolroll.parsers.reading.resolve import Schema
from toolroll.parsers.reading.values import value_by_schema
from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus, ParsedReply

TOOLS = [tool("f", {"x": {"type": "string"}}), tool("g", {"y": {"type": "integer"}})]
INVOKE = '<invoke name="g">\n<parameter name="y">2</parameter>\n</invoke>\n'
CLOSE = "Close with </think> please."
ONE = '"arguments": {"x": "1"}'
TWICE = '[{"f": {"x": "1"}, "f": {"x": "2"}}]'
DSML = '<｜DSML｜invoke name="f">["1"]</｜DSML｜invoke>'
UNCLOSED = ("qwen3_coder", "mimo", "glm45", "minimax-m2", "deepseekv4", "kimi_k3")
BOTH = [tool("f", {"x": {"type": "string"}, "y": {"type": "string"}}), *TOOLS[1:]]
OK, BAD, NO_JSON = CallStatus.OK, CallStatus.BAD_ARGUMENTS, CallStatus.INVALID_JSON


def read(name: str, text: str, *, tools: Any = TOOLS, in_reasoning: bool = False) -> ParsedReply:
    parser = get_parser(name)
    return assert_same_in_pieces(parser, text, tools=tools, in_reasoning=in_reasoning)


def test_an_unclosed_value_does_not_swallow_the_next_call() -> None:
    second = written("qwen3_coder", x="2")
    text = second.replace("</parameter>", "") + second
    first, second_call = read("qwen3_coder", text).tool_calls
    assert (first.name, first.status) == ("f", CallStatus.INVALID_JSON)
    assert (second_call.arguments, second_call.status) == ({"x": "2"}, CallStatus.OK)


def unclosed(name: str) -> str:
    """A call of f whose value x is not closed."""
    shape = cast(TagParser, get_parser(name)).shape
    return written(name, x="1", y="2").replace(shape.value[1], "", 1)


@pytest.mark.parametrize("tools", [BOTH, TOOLS, None])
@pytest.mark.parametrize("name", UNCLOSED)
def test_an_unclosed_value_does_not_swallow_the_next_parameter(name: str, tools: Any) -> None:
    calls = read(name, "\n".join([unclosed(name)] * 2), tools=tools).tool_calls
    assert [(call.name, call.status) for call in calls] == [("f", CallStatus.INVALID_JSON)] * 2
    assert "parameter x of f is not closed" in (calls[0].error or "")
    assert "before the parameter y" in (calls[0].error or "")


@pytest.mark.parametrize("name", UNCLOSED)
def test_a_parameters_control_token_is_never_part_of_a_value(name: str) -> None:
    text, parser = unclosed(name), get_parser(name)
    shape = cast(TagParser, parser).shape
    tags = (*shape.key, *shape.value, *parser.markers)
    longest_first = sorted(filter(None, tags), key=len, reverse=True)
    tokens = re.compile("|".join(map(re.escape, longest_first)) + "|.|\n")
    offsets = [match.span() for match in tokens.finditer(text)]
    reply = get_parser(name, tags).parse(
        text, ids=range(len(offsets)), offsets=offsets, tools=BOTH, in_reasoning=False
    )
    (call,) = reply.tool_calls
    assert (call.name, call.status) == ("f", CallStatus.INVALID_JSON)


def test_a_value_may_hold_a_whole_parameter() -> None:
    value = "Write <parameter=y>2</parameter> here."
    function = f"<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>"
    (call,) = read("qwen3_coder", f"<tool_call>\n{function}\n</tool_call>", tools=BOTH).tool_calls
    assert (call.arguments, call.error) == ({"x": value}, None)


def test_a_broken_call_in_a_block_does_not_hide_the_others() -> None:
    calls = f'{INVOKE}<invoke name="f">\n<what>\n</invoke>\n{INVOKE}'
    reply = read("minimax-m2", f"<minimax:tool_call>\n{calls}</minimax:tool_call>Done.")
    statuses = [(call.name, call.status.value) for call in reply.tool_calls]
    assert statuses == [("g", "ok"), ("f", "invalid_json"), ("g", "ok")]
    assert reply.content == "Done."


def test_text_between_the_calls_of_a_block_is_content() -> None:
    text = f"<minimax:tool_call>\n{INVOKE}and\n{INVOKE}</minimax:tool_call>"
    reply = read("minimax-m2", text)
    assert (len(reply.ok_calls), reply.content) == (2, "and")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "number"}, 3),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("x", {"type": ["integer", "string"]}, "x"),
        # a text that may be a string stays text
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
    typed_value = value_by_schema(text, None if schema is None else Schema.of(schema, valid=True))
    assert typed_value == value
    assert type(typed_value) is type(value)


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
def test_only_line_breaks_of_the_form_are_removed(name: str, written: str, value: str) -> None:
    text = f"<tool_call><function=f><parameter=x>{written}</parameter></function></tool_call>"
    (call,) = read(name, text).tool_calls
    assert (call.arguments, call.error) == ({"x": value}, None)


CLOSED = ("qwen3_coder", "glm45", "hermes", "minimax-m2", "deepseekv31", "lfm2")
IN_CALLS = {name: written(name, x=CLOSE) for name in CLOSED}
IN_CALLS["llama3"] = "<|python_tag|>" + written("llama3", x=CLOSE)


@pytest.mark.parametrize("name", IN_CALLS)
def test_a_closing_tag_in_a_call_does_not_close_reasoning(name: str) -> None:
    call, opener = IN_CALLS[name], get_parser(name).openers[0]
    for text in (f"I write it now.\n{call}", f"I write it now.</think>\n{call}"):
        reply = read(name, text, in_reasoning=True)
        assert (reply.reasoning, reply.content) == ("I write it now.", "")
        assert [call.arguments for call in reply.ok_calls] == [{"x": CLOSE}], reply.bad_calls
    # A call that is written before the tag that closes the reasoning is a part of it, and a marker
    # alone does not make a call.
    for thought in (f"Should I write {call}? No.", f"I know {opener} well."):
        reply = read(name, f"{thought}</think>Hello.", in_reasoning=True)
        assert (reply.reasoning, reply.content, reply.tool_calls) == (thought, "Hello.", ())


SAME, OTHER = (ONE.replace("arguments", "parameters").replace("1", value) for value in "12")
UNCLEAR = {
    "two kinds of arguments": ("hermes", f'{{"name": "f", {ONE}, {OTHER}}}', BAD),
    "the same arguments twice": ("hermes", f'{{"name": "f", {ONE}, {SAME}}}', OK),
    "two names": ("hermes", f'{{"name": "g", "name": "f", {ONE}}}', BAD),
    "a tool twice in one object": ("apertus2509", TWICE, CallStatus.MISSING_NAME),
    "an unpacked key twice": ("pythonic", "[f(**{'x': '1', 'x': '2'})]", NO_JSON),
    "an unpacked key and the key": ("pythonic", "[f(x='1', **{'x': '2'})]", BAD),
    "a list as arguments": ("deepseekv4", DSML, NO_JSON),
}
AROUND = {
    "hermes": "<tool_call>{}</tool_call>",
    "apertus2509": "<|tools_prefix|>{}<|tools_suffix|>",
    "pythonic": "{}",
    "deepseekv4": "<｜DSML｜tool_calls>{}</｜DSML｜tool_calls>",
}


@pytest.mark.parametrize("what", UNCLEAR)
def test_a_call_that_loses_a_value_is_not_ok(what: str) -> None:
    name, body, status = UNCLEAR[what]
    reply = read(name, AROUND[name].format(body))
    assert [call.status for call in reply.tool_calls] == [status]


def test_an_answer_in_json_with_a_key_twice_is_no_call() -> None:
    text = '{"city": "Rome", "city": "Paris"}'
    reply = read("llama3", text)
    assert (reply.content, reply.tool_calls) == (text, ())


def test_kimi_k3_escapes_names_and_keys_but_not_values() -> None:
    text = (
        '<|open|>tools<|sep|><|open|>call tool="r&amp;d" index="1"<|sep|><|open|>argument '
        'key="a&amp;b&quot;&amp;quot;" type="string"<|sep|>x&amp;y<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    )
    (call,) = assert_same_in_pieces(get_parser("kimi_k3"), text).tool_calls
    assert (call.name, call.arguments, call.ok) == ("r&d", {'a&b"&quot;': "x&amp;y"}, True)


@pytest.mark.parametrize("in_reasoning", [True, False, None])
def test_gemma4_may_double_the_token_that_opens_a_thought(in_reasoning: bool | None) -> None:
    text = "<|channel><|channel>thought\nI think.<channel|>Hello."
    reply = assert_same_in_pieces(get_parser("gemma4"), text, in_reasoning=in_reasoning)
    assert (reply.reasoning, reply.content) == ("I think.", "Hello.")
