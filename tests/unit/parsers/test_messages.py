"""Formats whose reasoning, text and calls are messages, and those with more than one pair of
tags for reasoning.
"""

from __future__ import annotations

import pytest
from support.parsing import assert_same_in_pieces, lost, tool

from toolroll.parsers.registry import get_parser

CALL = 'get<|content_invoke_tool_json|>{"name":"get","args":{}}<|end_message|>'


END, THOUGHT = "<|end_message|>", "I think.<|end_message|><|message_model|><|content_text|>Hello"
SAMPLING_END = "<|content_model_end_sampling|>"


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content", "statuses"),
    [
        ("Hello, world.", None, None, "Hello, world.", []),
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
        (
            f"{CALL}<|message_model|>{CALL.replace('{}', '')}",
            None,
            None,
            "",
            ["ok", "invalid_json"],
        ),
        (f"get<|content_invoke_tool_text|>it{SAMPLING_END}", None, None, "", ["missing_name"]),
    ],
)
def test_inkling(
    text: str, opened: bool | None, reasoning: str | None, content: str, statuses: list[str]
) -> None:
    reply = assert_same_in_pieces(get_parser("inkling"), text, in_reasoning=opened)
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert [call.status.value for call in reply.tool_calls] == statuses


@pytest.mark.parametrize("role", ["assistant", "user", "system", "developer"])
def test_a_message_to_a_role_is_not_a_call(role: str) -> None:
    text = f"<|channel|>commentary to={role}<|channel|>commentary?<|message|>x<|end|>y"
    parser = get_parser("gpt-oss")
    reply = assert_same_in_pieces(parser, text, tools=[tool("get")], in_reasoning=False)
    assert (reply.tool_calls, reply.content) == ((), f"commentary to={role}commentary?\nxy")
    assert not lost(parser, text, reply)
    assert not parser.parse(text).tool_calls
    (call,) = parser.parse(
        text.replace("x<", "{}<"), tools=[tool(role)], in_reasoning=False
    ).tool_calls
    assert (call.name, call.ok) == (role, True)


def test_inkling_spans_begin_with_the_message() -> None:
    text = f"<|content_text|>Hello<|end_message|><|message_model|>{CALL}"
    (call,) = get_parser("inkling").parse(text).tool_calls
    assert call.span is not None
    assert text[slice(*call.span)] == f"<|message_model|>{CALL}"


@pytest.mark.parametrize("tag", ["think", "think_fast", "think_faster"])
def test_each_effort_of_k2_horizon_has_tags_of_its_own(tag: str) -> None:
    parser = get_parser("k2_horizon")
    for text, opened in (
        (f"<ifm|{tag}>\nHm.\n</ifm|{tag}>\nHello", False),
        (f"Hm.</ifm|{tag}>Hello", True),
        (f"Hm.</ifm|{tag}>Hello", None),
    ):
        reply = assert_same_in_pieces(parser, text, in_reasoning=opened)
        assert (reply.reasoning, reply.content) == ("Hm.", "Hello")


CLOSER = "</rfl:parameter>"
LINES = {"\nParis\n": "Paris", "\n\n": "", "\n": "", "\n a\n\n": " a\n", f"\n{CLOSER}\n": CLOSER}


@pytest.mark.parametrize(("value", "read"), LINES.items())
def test_a_value_of_beams_stands_in_lines_of_its_own(value: str, read: str) -> None:
    start = " to=f<|channel|>analysis <|constrain|>xml<|message|>"
    text = f'{start}<rfl:parameter name="a">{value}{CLOSER}<|call|>'
    (call,) = assert_same_in_pieces(get_parser("beam"), text).tool_calls
    assert (call.status.value, call.arguments) == ("ok", {"a": read})
