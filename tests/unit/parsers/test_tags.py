"""Tagged formats: values by the schema, also with references and alternatives as pydantic writes
them, and calls that are not as they should be."""

from __future__ import annotations

import enum
import json
import re
from decimal import Decimal
from typing import Annotated, Any, Literal, Optional, cast

import pytest
from pydantic import BaseModel, Field, create_model
from support.calls import same
from support.formats import written
from support.parsing import assert_same_in_pieces, in_pieces, tool

from toolroll.parsers.formats.tags import TagParser
from toolroll.parsers.reading.resolve import Schema
from toolroll.parsers.reading.schema import Offered
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
    whole = written("qwen3_coder", x="2")
    first, second = read("qwen3_coder", whole.replace("</parameter>", "") + whole).tool_calls
    assert (first.name, first.status) == ("f", CallStatus.INVALID_JSON)
    assert (second.arguments, second.status) == ({"x": "2"}, CallStatus.OK)


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
    spans = [match.span() for match in tokens.finditer(text)]
    options: Any = {"ids": range(len(spans)), "offsets": spans, "tools": BOTH}
    (call,) = get_parser(name, tags).parse(text, **options, in_reasoning=False).tool_calls
    assert (call.name, call.status) == ("f", CallStatus.INVALID_JSON)


def test_a_value_may_hold_a_whole_parameter() -> None:
    value = "Write <parameter=y>2</parameter> here."
    function = f"<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>"
    (call,) = read("qwen3_coder", f"<tool_call>\n{function}\n</tool_call>", tools=BOTH).tool_calls
    assert (call.arguments, call.error) == ({"x": value}, None)


def test_a_block_keeps_its_text_and_calls_beside_a_broken_one() -> None:
    calls = f'{INVOKE}and\n{INVOKE}<invoke name="f">\n<what>\n</invoke>\n{INVOKE}'
    reply = read("minimax-m2", f"<minimax:tool_call>\n{calls}</minimax:tool_call>Done.")
    statuses = [(call.name, call.status.value) for call in reply.tool_calls]
    assert statuses == [("g", "ok"), ("g", "ok"), ("f", "invalid_json"), ("g", "ok")]
    assert reply.content == "and\nDone."


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "number"}, 3),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("x", {"type": ["integer", "string"]}, "x"),
        # a text that may be a string stays text
        ("true", {"anyOf": [{"type": "boolean"}, {"type": "string"}]}, "true"),
        ("7", {"type": ["integer", "string"], "enum": [7, "a"]}, 7),
        ("2", {"anyOf": [{"const": "1"}, {"type": "integer"}]}, 2),
        ("2", {"anyOf": [{"const": "1"}, {"type": "null"}]}, "2"),
        ("2", {"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]}, "2"),
        ("2.0", {"type": ["integer", "string"]}, "2.0"),
        ("7", {"anyOf": [{}, {"type": "string"}]}, 7),
        ("7", False, 7),
        ("8", {"enum": ["7", 8]}, 8),
        ("[1, 'a']", {"type": "array"}, [1, "a"]),
        ("x", {"type": "integer"}, "x"),
        ("2", {"type": "float"}, 2),
        ("2", {"$ref": "#/$defs/n"}, 2),
        ("1" * 5000, {"type": "integer"}, "1" * 5000),
        ("{" * 5000, None, "{" * 5000),
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


# --- schemas with references and alternatives -----------------------------------------------------

NAMES = ("qwen3_coder", "glm45", "minimax-m2", "minimax-m3", "deepseekv4", "beam", "k2_horizon")
STRING, NULL = {"type": "string"}, {"type": "null"}
YEARS = {"type": "string", "enum": ["2024", "2025"]}
OWN = {"$id": "urn:own", "$ref": "#/$defs/T", "$defs": {"T": STRING}}


def read_under(name: str, schema: Any, value: str) -> Any:
    """The call of `f` with the parameter `k`, under the schema of all parameters."""
    offered = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = written(name, k=value).replace(' string="true"', "")  # of any type
    parser = get_parser(name)
    reply = parser.parse(text, tools=offered, in_reasoning=False)
    assert in_pieces(parser, text, tools=offered, in_reasoning=False)[0] == reply
    (call,) = reply.tool_calls
    return call


def k(schema: Any, **more: Any) -> Any:
    return {"properties": {"k": schema}, **more}


def under(definition: Any, reference: str = "#/$defs/T", **more: Any) -> Any:
    return k({"$ref": reference}, **{"$defs": {"T": definition}}, **more)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (under(STRING), "90210", "90210"),
        (under({"enum": ["true", "auto"]}), "true", "true"),
        (under({"type": ["string", "number"], "enum": [1.0, "a"]}), "1", 1),
        (k({"anyOf": [YEARS, NULL]}), "2025", "2025"),
        (k({"anyOf": [YEARS, NULL]}), "null", None),
        (k({"allOf": [{"$ref": "#/x/Y"}]}, x={"Y": YEARS}), "2025", "2025"),
        ({"$ref": "#/$defs/Args", "$defs": {"Args": {"type": "object", **k(STRING)}}}, "7", "7"),
        ({"allOf": [{"properties": {"j": {}}}, {"oneOf": [k(STRING), NULL]}]}, "7", "7"),
        ({"type": "object", "additionalProperties": STRING}, "7", "7"),
        ({"patternProperties": {"^k": STRING}, "additionalProperties": False}, "7", "7"),
        ({"additionalProperties": True}, "7", 7),
        (k(True, additionalProperties=STRING), "7", 7),
        # two steps, names with escapes, the older keyword, a name of its own, an anchor
        (under(STRING, "#/x/y", x={"y": {"$ref": "#/$defs/T"}}), "7", "7"),
        (k({"$ref": "#/x/a~1b~0c%20d"}, x={"a/b~c d": STRING}), "7", "7"),
        (k({"$ref": "#/definitions/T"}, definitions={"T": STRING}), "7", "7"),
        (under({"$id": "urn:text", **STRING}, "urn:text"), "7", "7"),
        (under({"$anchor": "text", **STRING}, "#text"), "7", "7"),
        (under({"properties": {"j": {"$ref": "#/$defs/T"}}, **OWN}, "urn:own"), "7", "7"),
        # loops and references to nowhere say nothing about the type
        (k({"$ref": "#/properties/k"}), "7", 7),
        (under({"anyOf": [{"$ref": "#/$defs/T"}, STRING]}), "7", 7),
        (k({"$ref": "http://127.0.0.1:9/x"}), "7", 7),
        (k({"$ref": "#/nowhere"}), "7", 7),
        (k({"$ref": "http://["}), "7", 7),
        (k({"$ref": "#/x/no_number"}, x=[STRING]), "7", 7),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_reference_gives_a_values_type(name: str, schema: Any, text: str, value: Any) -> None:
    call = read_under(name, schema, text)
    assert call.status is CallStatus.OK, call.error
    assert same(call.arguments, {"k": value})


def test_elements_of_elements_are_read_by_their_references() -> None:
    next_node = {"anyOf": [{"$ref": "#/$defs/Node"}, NULL]}
    node = {"type": "object", "properties": {"id": STRING, "next": next_node}}
    codes = {"type": "array", "items": {"$ref": "#/$defs/Node/properties/id"}}
    properties = {"k": {"$ref": "#/$defs/Node"}, "codes": codes}
    schema = {"properties": properties, "$defs": {"Node": node}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    arguments = {"k": {"id": "1", "next": {"id": "2"}}, "codes": ["007"]}
    text = written("minimax-m3", **arguments)
    (call,) = get_parser("minimax-m3").parse(text, tools=tools).tool_calls
    assert call.arguments == arguments


def test_a_schema_that_is_changed_in_place_is_read_again() -> None:
    schema = k({"type": "string"})
    assert read_under("glm45", schema, "7").arguments == {"k": "7"}
    schema["properties"]["k"]["type"] = "integer"
    assert read_under("glm45", schema, "7").arguments == {"k": 7}


def test_a_schema_without_an_end_has_an_answer() -> None:
    """Every part of a schema that doubles 60 times would be 10 ** 18 steps."""
    doubled = {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)}
    for last in (STRING, k(STRING)):
        schema: Any = {"$ref": "#/$defs/0", "$defs": {**doubled, "60": last}}
        function = {"name": "f", "parameters": schema}
        parameters: Any = Offered([{"type": "function", "function": function}]).parameters("f")
        assert parameters.schema.allowed.kinds is None
        assert parameters.schema.member("k") is None


Color = enum.Enum("Color", {"RED": "1"})
Mixed = enum.Enum("Mixed", {"WORD": "a", "NUMBER": 1})


class Node(BaseModel):
    name: str
    child: Node | None = None


Zip = Annotated[str, Field(pattern=r"^\d+$", min_length=3)]
VALUES: list[tuple[Any, ...]] = [
    (str, "90210", "null"),
    (float, 1.5, 2.0),
    (Color, Color.RED),
    (Mixed, Mixed.NUMBER, Mixed.WORD),
    (Literal[1, "a"], 1),
    (str | None, "12", None),
    (int | str | None, None),
    (Node, Node(name="1", child=Node(name="2"))),
    (tuple[int, str], (1, "2")),
    (Decimal | None, Decimal("0.1")),
    (Optional[Zip], "007"),  # noqa: UP045 - pyright: `Zip` is no class
]
FIELDS = [(field, value) for field, *values in VALUES for value in values]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "minimax-m3"])
@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda it: str(it)[:40])
def test_what_pydantic_describes_and_writes_is_read_back(name: str, field: Any, value: Any) -> None:
    model = create_model("Args", k=(field, ...))
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    whole = {"$ref": "#/$defs/Args", "$defs": {"Args": schema, **definitions}}
    written = model(k=value).model_dump(mode="json")["k"]
    bare = written if isinstance(written, str) else json.dumps(written)
    for parameters in ({**schema, "$defs": definitions}, whole):
        call = read_under(name, parameters, bare)
        assert call.status is CallStatus.OK, call.error
        assert model.model_validate(call.arguments) == model(k=value)
