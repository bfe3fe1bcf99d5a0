"""Formats one by one: hermes, those whose replies are messages, MiniMax M3, and which quotes of
strings each format reads."""

from typing import Any

import pytest
from support.formats import written
from support.parsing import assert_same_in_pieces, lost, tool

from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus

# --- hermes ---------------------------------------------------------------------------------------

PARAMETERS = {"order_id": {"type": "string"}, "n": {"type": "integer"}}
QUOTED = {"s": {"type": "string"}, "rows": {"type": "array"}, "o": {"type": "object"}}
TOOLS = [tool("get_order", PARAMETERS, required=["order_id"]), tool("list_all"), tool("f", QUOTED)]
GOOD = '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "#W1"}}\n</tool_call>'
ALL = '{"name": "list_all", "arguments": {}}'
BLOCK = "<tool_call>{}</tool_call>".format


def parse(text: str, name: str = "qwen25", **options: Any) -> Any:
    parser, options = get_parser(name), {"tools": TOOLS, "in_reasoning": False} | options
    reply = assert_same_in_pieces(parser, text, **options)
    assert not lost(parser, text, reply)
    return reply


def order(arguments: str) -> str:
    return f'{{"name": "get_order", "arguments": {arguments}}}'


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        # empty arguments are an empty object
        *((BLOCK(ALL.replace("{}", empty)), ["ok"]) for empty in ('""', '" "', '"{}"', "{}")),
        # parallel calls in blocks, in one block, and as a list
        (f"{BLOCK(ALL)}\n{BLOCK(ALL)}", ["ok", "ok"]),
        (BLOCK(f"{ALL}\n{ALL}"), ["ok", "ok"]),
        (BLOCK(f"[{ALL}, {ALL}]"), ["ok", "ok"]),
        # an unclosed call ends where the next one begins
        (f"<tool_call>{ALL}{BLOCK(ALL)}", ["unclosed", "ok"]),
    ],
)
def test_the_calls_of_a_reply(text: str, statuses: list[str]) -> None:
    calls = parse(text).tool_calls
    assert [(call.name, call.status.value) for call in calls] == [("list_all", s) for s in statuses]
    assert all(call.arguments == {} for call in calls if call.ok)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("{'name': 'list_all'}", CallStatus.INVALID_JSON, "double quotes"),
        ('{"arguments": {}}', CallStatus.MISSING_NAME, "name"),
        ('{"name": "nobody", "arguments": {}}', CallStatus.UNKNOWN_TOOL, "get_order, list_all"),
        (order("{}"), CallStatus.BAD_ARGUMENTS, "order_id"),
        (order("[1]"), CallStatus.BAD_ARGUMENTS, "must be a JSON object, not list"),
        (order('{"order_id": "a", "n": "x"}'), CallStatus.BAD_ARGUMENTS, "n: "),
        (order('{"order_id": "a", "n": NaN}'), CallStatus.INVALID_JSON, "JSON"),
        (order('{"order_id": "a", "n": 1e999}'), CallStatus.INVALID_JSON, "range"),
        ("", CallStatus.INVALID_JSON, "JSON"),
        ("3", CallStatus.INVALID_JSON, "object"),
    ],
)
def test_a_bad_call_is_kept_with_its_reason(body: str, status: CallStatus, words: str) -> None:
    reply = parse(f"Text <tool_call>{body}</tool_call> more")
    (call,) = reply.tool_calls
    assert call.status is status
    assert words in call.error
    assert (call.raw.strip(), reply.content) == (body, "Text  more")


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content", "calls"),
    [
        (f"<think>\nI should look.\n</think>\n\n{GOOD}", False, "I should look.", "", 1),
        (f"I should look.\n</think>\n\nHello {GOOD}", True, "I should look.", "Hello", 1),
        (f"<think>I should look. {GOOD}", False, "I should look. ", "", 1),
        ("<think>I should", False, "I should", "", 0),
        # a call that is weighed in closed reasoning is not a call
        (f"<think>Write {GOOD}? No.</think>Hello", False, f"Write {GOOD}? No.", "Hello", 0),
        ("Just text </think> with a tag", False, None, "Just text </think> with a tag", 0),
        ("thought</think>text", None, "thought", "text", 0),
    ],
)
def test_reasoning_is_apart_and_its_unclosed_call_is_seen(
    text: str, opened: bool | None, reasoning: str | None, content: str, calls: int
) -> None:
    reply = parse(text, in_reasoning=opened)
    assert (reply.reasoning, reply.content, len(reply.ok_calls)) == (reasoning, content, calls)
    assert reply.bad_calls == ()


def test_a_closed_stream_takes_nothing_more() -> None:
    stream = get_parser("hermes").stream()
    stream.finish("x")
    with pytest.raises(ValueError, match="closed"):
        stream.feed("y")


# --- messages, and several pairs of tags for reasoning --------------------------------------------

CALL = 'get<|content_invoke_tool_json|>{"name":"get","args":{}}<|end_message|>'
BROKEN = CALL.replace("{}", "")
END, THOUGHT = "<|end_message|>", "I think.<|end_message|><|message_model|><|content_text|>Hello"
SAMPLING_END = "<|content_model_end_sampling|>"


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content", "statuses"),
    [
        (f"Hello{END}", None, None, "Hello", []),
        (THOUGHT, True, "I think.", "Hello", []),
        ("<|content_thinking|>I thi", None, "I thi", "", []),
        (CALL, None, None, "", ["ok"]),
        (f"Hello <|message_model|>{CALL}", None, None, "Hello", ["ok"]),
        # a header stands behind its token only
        (f"I think.{CALL}", True, "I think.get", "", ["ok"]),
        # what ends it may be the stop token
        (CALL.removesuffix(END), None, None, "", ["ok"]),
        (CALL.replace(END, SAMPLING_END), None, None, "", ["ok"]),
        (f"{CALL}<|message_model|>{BROKEN}", None, None, "", ["ok", "invalid_json"]),
    ],
)
def test_inkling(text: str, opened: Any, reasoning: Any, content: str, statuses: list[str]) -> None:
    reply = parse(text, "inkling", tools=None, in_reasoning=opened)
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert [call.status.value for call in reply.tool_calls] == statuses


def test_inkling_spans_begin_with_the_message() -> None:
    text = f"<|content_text|>Hello<|end_message|><|message_model|>{CALL}"
    (call,) = parse(text, "inkling", tools=None, in_reasoning=None).tool_calls
    assert text[slice(*call.span)] == f"<|message_model|>{CALL}"


@pytest.mark.parametrize("role", ["assistant", "user", "system", "developer"])
def test_a_message_to_a_role_is_not_a_call(role: str) -> None:
    text = f"<|channel|>commentary to={role}<|channel|>commentary?<|message|>x<|end|>y"
    reply = parse(text, "gpt-oss", tools=[tool("get")])
    assert (reply.tool_calls, reply.content) == ((), f"commentary to={role}commentary?\nxy")
    assert not get_parser("gpt-oss").parse(text).tool_calls
    (call,) = parse(text.replace("x<", "{}<"), "gpt-oss", tools=[tool(role)]).tool_calls
    assert (call.name, call.ok) == (role, True)


@pytest.mark.parametrize("tag", ["think", "think_fast", "think_faster"])
def test_each_effort_of_k2_horizon_has_tags_of_its_own(tag: str) -> None:
    closed = f"Hm.</ifm|{tag}>Hello"
    whole = f"<ifm|{tag}>\nHm.\n</ifm|{tag}>\nHello"
    for text, opened in ((whole, False), (closed, True), (closed, None)):
        reply = parse(text, "k2_horizon", tools=None, in_reasoning=opened)
        assert (reply.reasoning, reply.content) == ("Hm.", "Hello")


CLOSER = "</rfl:parameter>"
LINES = {"\nParis\n": "Paris", "\n\n": "", "\n": "", "\n a\n\n": " a\n", f"\n{CLOSER}\n": CLOSER}


@pytest.mark.parametrize(("value", "read"), LINES.items())
def test_a_value_of_beams_stands_in_lines_of_its_own(value: str, read: str) -> None:
    start = " to=f<|channel|>analysis <|constrain|>xml<|message|>"
    text = f'{start}<rfl:parameter name="a">{value}{CLOSER}<|call|>'
    (call,) = parse(text, "beam", tools=None, in_reasoning=None).tool_calls
    assert (call.status.value, call.arguments) == ("ok", {"a": read})


# --- the elements of MiniMax M3, read by the schema level by level --------------------------------

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


POINTS = element("points", *items(element("x", "1") + element("name", "2")))


def invoked(inner: str) -> str:
    return f'{M}<tool_call>\n{M}<invoke name="f">{inner}{M}</invoke>\n{M}</tool_call>'


def arguments(inner: str, *schemas: Any) -> Any:
    tools = [tool("f", schema) for schema in schemas] or None
    (call,) = parse(invoked(inner), "minimax-m3", tools=tools).tool_calls
    return call.arguments if call.ok else call.status.value


@pytest.mark.parametrize(
    ("inner", "found"),
    [
        (POINTS, {"points": [{"x": 1, "name": "2"}]}),
        (element("pair", *items("7", "7")), {"pair": ["7", 7]}),
        (element("tags", element("a", "1"), element("b", "2")), {"tags": {"a": "1", "b": "2"}}),
        (element("item", *items("1")), {"item": {"item": "1"}}),
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
    assert arguments(inner, SCHEMAS) == found


@pytest.mark.parametrize(
    ("inner", "found"),
    [
        (element("a", *items("1", "x")), {"a": [1, "x"]}),
        (element("a", *items("1"), element("b", "x")), {"a": {"item": 1, "b": "x"}}),
        (element("a", "1") + element("a", "2") + element("a", "3"), {"a": [1, 2, 3]}),
        (element("a", ""), {"a": ""}),
        (element("a", "x" + element("b", "1")), "invalid_json"),
        (element("a", element("b", "1") + "x"), "invalid_json"),
        (f"{M}</a>", "invalid_json"),
        (f"{M}<a b{M}</a>", "invalid_json"),
        (f"{M}<a>" * 120 + f"{M}</a>" * 120, "invalid_json"),
    ],
)
def test_without_a_schema_elements_say_it_themselves(inner: str, found: Any) -> None:
    assert arguments(inner) == found


@pytest.mark.parametrize(
    ("text", "opened", "reasoning"), [("", False, None), ("", None, None), ("Hm.", True, "Hm.")]
)
def test_a_reply_may_begin_by_closing_a_thought(text: str, opened: Any, reasoning: Any) -> None:
    text = f"{text}</mm:think>Hello.{invoked('')}"
    reply = parse(text, "minimax-m3", tools=None, in_reasoning=opened)
    assert (reply.content, reply.reasoning, len(reply.ok_calls)) == ("Hello.", reasoning, 1)


# --- the quotes of strings ------------------------------------------------------------------------
# A model may put strings into the quotes of another format. Then the call has the model's value,
# or it is unreadable; the quotes never become a part of the value.

Q = '<|"|>'
OF_TEXT = ('"x', 'x"', "'x", "x'", f'{Q}x"', f'"x{Q}', f'"x{Q}y"', '"a" "b"', 'say "hi"', '"a\nb"')
OF_JSON = ("hermes", "mistral", "kimi_k2", "deepseekv31", "gpt-oss")
OK, UNREADABLE = CallStatus.OK, CallStatus.INVALID_JSON


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{rows:["ds_152"]}', {"rows": ["ds_152"]}),
        ("{rows:['ds_152']}", {"rows": ["ds_152"]}),
        ('{rows:["a, b", "c"]}', {"rows": ["a, b", "c"]}),
        ('{s:"ls -la"}', {"s": "ls -la"}),
        ('{rows:[{"id": 1, "name": "x]y"}]}', {"rows": [{"id": 1, "name": "x]y"}]}),
        ("{'s': 'a', \"o\": {<|\"|>k<|\"|>:'}'}}", {"s": "a", "o": {"k": "}"}}),
        (f"{{rows:[\"a\",'b',{Q}c{Q},d,1,null]}}", {"rows": ["a", "b", "c", "d", 1, None]}),
        (r'{s:"a\"b\u00e9\n\/"}', {"s": 'a"bé\n/'}),
        (r"{s:'a\'b\n'}", {"s": "a'b\n"}),
        (f"{{s:{Q}say \"hi\", 'you'{Q}}}", {"s": "say \"hi\", 'you'"}),
        ('{s:""}', {"s": ""}),
        ("{s:ls -la}", {"s": "ls -la"}),
    ],
)
def test_gemma_with_other_quotes_has_the_value_of_the_model(body: str, arguments: Any) -> None:
    (call,) = parse(f"<|tool_call>call:f{body}<tool_call|>", "gemma4").tool_calls
    assert (call.status, call.arguments, call.error) == (CallStatus.OK, arguments, None)


@pytest.mark.parametrize(
    "body",
    [*(f"{{s:{text}}}" for text in OF_TEXT), "{s:'say 'a', o: 'b'}", '{"s:1}', '{rows:["a]}'],
)
def test_gemma_with_quotes_that_do_not_match_is_unreadable(body: str) -> None:
    (call,) = parse(f"<|tool_call>call:f{body}<tool_call|>", "gemma4").tool_calls
    assert (call.name, call.status) == ("f", CallStatus.INVALID_JSON)
    assert "f" in call.error


def dsml(attribute: str, value: str) -> str:
    return written("deepseekv4", s=value).replace('string="true"', f'string="{attribute}"')


def kimi(kind: str, value: str) -> str:
    return written("kimi_k3", s=value).replace('type="string"', f'type="{kind}"')


@pytest.mark.parametrize(
    ("name", "text", "status", "value"),
    [
        # a value that is marked as JSON is JSON
        ("deepseekv4", dsml("false", '"Paris"'), OK, "Paris"),
        ("deepseekv4", dsml("false", "'Paris'"), UNREADABLE, None),
        ("deepseekv4", dsml("false", '"Paris'), UNREADABLE, None),
        ("deepseekv4", dsml("True", "90210"), OK, "90210"),
        ("deepseekv4", dsml("true", '"Paris"'), OK, '"Paris"'),
        ("kimi_k3", kimi("object", '"Paris"'), OK, "Paris"),
        ("kimi_k3", kimi("array", '"Paris'), UNREADABLE, None),
        # formats with JSON take no other quotes, and Python takes both
        *((name, written(name, s="x").replace('"', "'"), UNREADABLE, 0) for name in OF_JSON),
        ("pythonic", '[f(s="a", rows=[\'b\', "c"])]', OK, "a"),
        ("pythonic", "[f(s='a\")]", CallStatus.UNCLOSED, 0),
        ("lfm2", "<|tool_call_start|>[f(s='a\")]<|tool_call_end|>", UNREADABLE, 0),
    ],
)
def test_quotes_are_the_formats_own(name: str, text: str, status: CallStatus, value: Any) -> None:
    (call,) = parse(text, name).tool_calls
    assert call.status is status, call.error
    assert not call.ok or call.arguments["s"] == value
