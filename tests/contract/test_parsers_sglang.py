"""Our parsers against SGLang 0.5.23's of the same name: the same calls and the same text on
well-formed replies, and each difference in `DIFFERENCES`; and `sglang:NAME`, which reports what
SGLang's parser drops."""

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
GET = "get_order"
TOOLS = tools_for([(GET, {"id": "#W1", "n": 1})])
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


Difference = tuple[str, str, list[Any], list[Any] | None]
"""The parser, a text, our calls with their status, and SGLang's calls."""


def written_as(name: str, arguments: dict[str, Any], *theirs: dict[str, Any]) -> Difference:
    """A well-formed call, which SGLang reads with other arguments, `theirs`, or not at all."""
    write = next(form.write for form in FORMATS if form.name == name)
    text, ours = write([(GET, arguments)]), [[GET, arguments, "ok"]]
    return name, text, ours, [[GET, each] for each in theirs]


DIFFERENCES: dict[str, Difference] = {
    "markers may stand in strings": written_as("hermes", {"id": "</tool_call>"}),
    "numbers may be negative": written_as("pythonic", {"n": -1}),
    "a number may have an exponent": written_as("gemma4", {"n": 1e22}, {"n": "1e+22"}),
    "a string keeps its white space": written_as("deepseekv32", {"id": " a\n"}, {"id": "a"}),
    "a string may be the word true": written_as("glm45", {"id": "true"}, {"id": "True"}),
    "a string may be the word null": written_as("qwen3_coder", {"id": "null"}, {"id": None}),
    "a string may read as JSON": written_as("muse", {"id": "10"}, {"id": 10}),
    "harmony needs no header": written_as("gpt-oss", {"id": "a"}),
    "a number under no schema is a number": written_as(
        "minimax-m3", {"id": "a", "more": {"m": 7}}, {"id": "a", "more": {"m": "7"}}
    ),
    "a string in elements keeps its edges": written_as("minimax-m3", {"id": " a\n"}, {"id": " a"}),
    "a value may hold <": written_as("step3", {"id": "a<b"}, {}),
    "broken JSON is kept": (
        "qwen25",
        '<tool_call>\n{"name": "get_order"\n</tool_call>',
        [[GET, None, "invalid_json"]],
        [],
    ),
    "an unclosed call is kept": ("qwen25", GOOD[:-13], [[GET, {"id": "a"}, "unclosed"]], []),
    "an unknown tool is kept": (
        "qwen25",
        GOOD.replace(GET, "nobody"),
        [["nobody", {"id": "a"}, "unknown_tool"]],
        [],
    ),
    "the type any is read as it reads best": (
        "k2_horizon",
        "<ifm|tool_call>get_order<ifm|arg_key>more</ifm|arg_key><ifm|arg_type>any</ifm|arg_type>"
        "<ifm|arg_value>7</ifm|arg_value></ifm|tool_call>",
        [[GET, {"more": 7}, "ok"]],
        [[GET, {"more": "7"}]],
    ),
    "a value must stand in lines of its own": (
        "beam",
        " to=get_order<|channel|>analysis <|constrain|>xml<|message|>"
        '<rfl:parameter name="id">a</rfl:parameter><|call|>',
        [[GET, None, "invalid_json"]],
        [[GET, {}]],
    ),
}


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
