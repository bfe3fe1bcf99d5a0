"""Our parsers against SGLang 0.5.23's of the same name: the same calls and the same text on
well-formed replies, and each difference in `DIFFERENCES`; and `sglang:NAME`, which reports what
SGLang's parser drops."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.calls import ordinary_calls, same
from support.formats import FORMATS, Call, Format, tools_for
from support.sglang_side import Case, ask

from toolroll.parsers.registry import get_parser, parser_names

EACH = 200
TOOLS = tools_for([("get_order", {"id": "#W1", "n": 1})])
GOOD = '<tool_call>\n{"name": "get_order", "arguments": {"id": "a"}}\n</tool_call>'


def anywhere(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether `test` holds for a value or for one inside it."""

    def found(value: Any) -> bool:
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
        return test(value) or any(found(one) for one in inner)

    return found


NEGATIVE = anywhere(
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0
)
NULL = anywhere(lambda value: value is None)
WIDE_FLOAT = anywhere(lambda value: value == 1e22 and isinstance(value, float))


def some_string(test: Callable[[str], bool]) -> Callable[[dict[str, Any]], bool]:
    """Whether `test` holds for an argument that is a string."""
    return lambda arguments: any(
        isinstance(value, str) and test(value) for value in arguments.values()
    )


def says(*words: str) -> Callable[[dict[str, Any]], bool]:
    """Whether an argument is one of `words` but for white space."""
    return some_string(lambda value: value.strip() in words)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


EDGED = some_string(lambda value: value != value.strip())
QUOTED = some_string(lambda value: bool(re.fullmatch(r'\s*".*"\s*', value, re.DOTALL)))
READS_AS_JSON = some_string(is_json)


# Arguments that SGLang's parser reads otherwise. Our parsers keep a string that the schema allows,
# with the white space at its edges, and read negative numbers, null and floats as what they are.
LISTED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "pythonic": NEGATIVE,
    "gemma4": lambda value: NULL(value) or WIDE_FLOAT(value),
    "qwen3_coder": says("null"),
    "mimo": says("null"),
    "minimax-m2": lambda value: says("null")(value) or EDGED(value),
    "glm45": lambda value: says("null", "true", "false")(value) or QUOTED(value),
    "minicpm5": lambda value: READS_AS_JSON(value) or EDGED(value),
    "muse": READS_AS_JSON,
    "dots": lambda value: says("null")(value) or EDGED(value),
    "iquest_q1": lambda value: says("null", "true", "false")(value) or QUOTED(value),
    "minimax-m3": anywhere(lambda value: isinstance(value, str) and value != value.rstrip()),
    **dict.fromkeys(("deepseekv32", "deepseekv4", "deepseekv41", "step3"), EDGED),
}


def reply_of(form: Format, picks: random.Random) -> tuple[str, list[Call]]:
    """A well-formed reply of the family, without a listed difference."""
    listed = LISTED.get(form.name, lambda _: False)
    while True:
        found = ordinary_calls(form, picks)
        if not any(listed(arguments) for _, arguments in found):
            break
    lead = picks.choice(("", "I look it up.\n", "Ünïcode: «x»\n\n"))
    if not form.spoken:
        lead = ""
    if form.name == "gpt-oss":  # SGLang's parser wants the header that the prompt ends with
        lead = "<|start|>assistant"
    return lead + form.write(found), found


@cache
def written() -> list[Case]:
    """EACH replies of each format, in the order of FORMATS."""
    picks = random.Random(5)
    found = []
    for form in FORMATS:
        for _ in range(EACH):
            text, calls = reply_of(form, picks)
            found.append((form.name, text, tools_for(calls)))
    return found


@cache
def answers() -> dict[str, list[Any]]:
    """What SGLang's parsers make of all cases of this file: its imports take five seconds, so it
    is asked once.
    """
    differing = [(name, text, TOOLS) for name, text, _, _ in DIFFERENCES.values()]
    return ask([*written(), *differing], [("qwen25", text, TOOLS) for text in DROPPED])


@pytest.mark.parametrize(
    "place", range(len(FORMATS)), ids=[f"{form.name}-{form.write.__name__}" for form in FORMATS]
)
def test_well_formed_replies_are_read_as_sglang_reads_them(place: int) -> None:
    parser = get_parser(FORMATS[place].name)
    differing = []
    here = slice(place * EACH, (place + 1) * EACH)
    for (_, text, tools), theirs in zip(written()[here], answers()["theirs"][here], strict=True):
        reply = parser.parse(text, tools=tools, in_reasoning=False)
        ours = [[call.name, call.arguments] for call in reply.ok_calls]
        if (
            not same(ours, theirs["calls"])
            or reply.bad_calls
            or reply.content != theirs["text"].strip()
        ):
            differing.append((text, ours, theirs))
    assert not differing, f"{len(differing)} of {EACH}, the first: {differing[0]}"


_M3 = "]<]minimax[>["


def _m3(inner: str) -> str:
    """MiniMax M3's call of the tool with what is in it."""
    return f'{_M3}<tool_call>{_M3}<invoke name="get_order">{inner}{_M3}</invoke>{_M3}</tool_call>'


DIFFERENCES: dict[str, tuple[str, str, list[Any], list[Any] | None]] = {
    # what: (parser, text, our calls with their status, SGLang's calls)
    "broken JSON is kept": ("qwen25", '<tool_call>\n{"name": '
                                      '"get_order"\n</tool_call>', [["get_order", None,
                                      "invalid_json"]], []),
    "an unclosed call is kept": ("qwen25", GOOD[:-13], [["get_order", {"id": "a"}, "unclosed"]],
    []),
    "an unknown tool is kept": ("qwen25", GOOD.replace("get_order", "nobody"), [["nobody",
    {"id": "a"}, "unknown_tool"]], []),
    "no line break is needed": ("qwen25", GOOD.replace("\n", ""), [["get_order", {"id": "a"},
    "ok"]], []),
    "markers may stand in strings": (
        "hermes",
        GOOD.replace('"a"', '"</tool_call>"'),
        [["get_order", {"id": "</tool_call>"}, "ok"]],
        [],
    ),
    "numbers may be negative": ("pythonic", "[get_order(n=-1)]", [["get_order", {"n": -1}, "ok"]],
    []),
    "null is null": (
        "gemma4",
        "<|tool_call>call:get_order{id:null}<tool_call|>",
        [["get_order", {"id": None}, "bad_arguments"]],
        [["get_order", {"id": "null"}]],
    ),
    "a number may have an exponent": (
        "gemma4",
        "<|tool_call>call:get_order{n:1e+22}<tool_call|>",
        [["get_order", {"n": 1e22}, "ok"]],
        [["get_order", {"n": "1e+22"}]],
    ),
    "a string keeps its white space": (
        "deepseekv32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_order">\n'
        '<｜DSML｜parameter name="id" string="true"> a\n</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [["get_order", {"id": " a\n"}, "ok"]],
        [["get_order", {"id": "a"}]],
    ),
    "a string may be the word true": (
        "glm45",
        "<tool_call>get_order\n<arg_key>id</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        [["get_order", {"id": "true"}, "ok"]],
        [["get_order", {"id": "True"}]],
    ),
    "a string may be the word null": (
        "qwen3_coder",
        "<tool_call>\n<function=get_order>\n<parameter=id>\nnull\n</parameter>\n</function>\n</tool_call>",
        [["get_order", {"id": "null"}, "ok"]],
        [["get_order", {"id": None}]],
    ),
    "a string may read as JSON": (
        "muse",
        ' to=get_order<|message|><atem:function_calls>\n<atem:invoke name="get_order">\n'
        '<atem:parameter name="id">10</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>",
        [["get_order", {"id": "10"}, "ok"]],
        [["get_order", {"id": 10}]],
    ),
    "harmony needs no header": (
        "gpt-oss",
        '<|channel|>commentary to=functions.get_order <|constrain|>json<|message|>{"id": '
        '"a"}<|call|>',
        [["get_order", {"id": "a"}, "ok"]],
        [],
    ),
    "a number under no schema is a number": (
        "minimax-m3",
        _m3(f"{_M3}<id>a{_M3}</id>{_M3}<more>{_M3}<m>7{_M3}</m>{_M3}</more>"),
        [["get_order", {"id": "a", "more": {"m": 7}}, "ok"]],
        [["get_order", {"id": "a", "more": {"m": "7"}}]],
    ),
    "a string in elements keeps its white space": (
        "minimax-m3",
        _m3(f"{_M3}<id> a\n{_M3}</id>"),
        [["get_order", {"id": " a\n"}, "ok"]],
        [["get_order", {"id": " a"}]],
    ),
    "text among elements is no argument": (
        "minimax-m3",
        _m3(f"a{_M3}<id>a{_M3}</id>"),
        [["get_order", None, "invalid_json"]],
        [["get_order", {"id": "a"}]],
    ),
    "the type any is read as it reads best": (
        "k2_horizon",
        "<ifm|tool_call>get_order<ifm|arg_key>more</ifm|arg_key><ifm|arg_type>any</ifm|arg_type><ifm|arg_value>7</ifm|arg_value>"
        "</ifm|tool_call>",
        [["get_order", {"more": 7}, "ok"]],
        [["get_order", {"more": "7"}]],
    ),
    "a broken call hides no other": (
        "inkling",
        '<|content_invoke_tool_json|>{"name":"get_order","args":{"n":1}}<|end_message|>'
        '<|message_model|><|content_invoke_tool_json|>{"name":"get_order","args":}<|end_message|>',
        [["get_order", {"n": 1}, "ok"], ["get_order", None, "invalid_json"]],
        [],
    ),
    "a value must stand in lines of its own": (
        "beam",
        ' to=get_order<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter '
        'name="id">a</rfl:parameter><|call|>',
        [["get_order", None, "invalid_json"]],
        [["get_order", {}]],
    ),
    "JSON that is no call is text": ("llama3", '{"city": "Paris"}', [], []),
    "a value may hold <": (
        "step3",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke '
        'name="get_order">\n'
        '<steptml:parameter '
        'name="id">a<b</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
        [["get_order", {"id": "a<b"}, "ok"]],
        [["get_order", {}]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENCES)
def test_each_listed_difference_is_there(what: str) -> None:
    name, text, ours, theirs = DIFFERENCES[what]
    reply = get_parser(name).parse(text, tools=TOOLS, in_reasoning=False)
    assert [[call.name, call.arguments, call.status.value] for call in reply.tool_calls] == ours
    at = len(written()) + list(DIFFERENCES).index(what)
    assert answers()["theirs"][at]["calls"] == theirs


def test_every_name_of_sglangs_that_is_a_format_is_ours() -> None:
    names = answers()["names"]
    assert set(names) - set(parser_names()) == {"response_template"}


DROPPED = (
    GOOD,
    f"Hello {GOOD}",
    GOOD.replace("}}", "}"),
    GOOD[:-13],
    GOOD.replace("get_order", "nobody"),
    "just text",
)


def test_what_sglangs_parser_drops_is_reported() -> None:
    ours = answers()["ours"]
    assert [[call[1] for call in answer["calls"]] for answer in ours] == [
        ["ok"], ["ok"], ["invalid_json"], ["unclosed"], ["unknown_tool"], []
    ]  # fmt: skip
    assert [answer["content"] for answer in ours] == ["", "Hello", "", "", "", "just text"]
    assert "SGLang's parser qwen25 dropped this" in ours[2]["calls"][0][2]
