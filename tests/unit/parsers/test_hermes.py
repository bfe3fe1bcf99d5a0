"""The hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen 2.5's
and Qwen 3's templates show it.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.parsing import assert_same_in_pieces, lost, tool

from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus

PARAMETERS = {"order_id": {"type": "string"}, "n": {"type": "integer"}}
TOOLS = [tool("get_order", PARAMETERS, required=["order_id"]), tool("list_all")]
GOOD = '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "#W1"}}\n</tool_call>'


def parse(text: str, **options: Any) -> Any:
    parser, options = get_parser("qwen25"), {"tools": TOOLS, "in_reasoning": False} | options
    reply = assert_same_in_pieces(parser, text, **options)
    assert not lost(parser, text, reply)
    return reply


def order(arguments: str) -> str:
    return f'{{"name": "get_order", "arguments": {arguments}}}'


@pytest.mark.parametrize("arguments", ['""', '" "', '"{}"', "{}"])
def test_empty_arguments_are_an_empty_object(arguments: str) -> None:
    body = f'{{"name": "list_all", "arguments": {arguments}}}'
    (call,) = parse(f"<tool_call>{body}</tool_call>").ok_calls
    assert call.arguments == {}


def test_parallel_calls_in_blocks_in_one_block_and_as_a_list() -> None:
    body = '{"name": "list_all", "arguments": {}}'
    for text in (
        f"<tool_call>{body}</tool_call>\n<tool_call>{body}</tool_call>",
        f"<tool_call>{body}\n{body}</tool_call>",
        f"<tool_call>[{body}, {body}]</tool_call>",
    ):
        assert [call.name for call in parse(text).ok_calls] == ["list_all", "list_all"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (order('{"order_id": "#W1"}')[:-1], CallStatus.INVALID_JSON, "JSON"),
        (order('{"order_id": #W1}'), CallStatus.INVALID_JSON, "character"),
        ("{'name': 'list_all'}", CallStatus.INVALID_JSON, "double quotes"),
        ('{"arguments": {}}', CallStatus.MISSING_NAME, "name"),
        ('{"name": "nobody", "arguments": {}}', CallStatus.UNKNOWN_TOOL, "get_order, list_all"),
        (order("{}"), CallStatus.BAD_ARGUMENTS, "order_id"),
        (order("[1]"), CallStatus.BAD_ARGUMENTS, "object"),
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
    assert call.raw.strip() == body
    assert reply.content == "Text  more"


@pytest.mark.parametrize("cut", range(12, len(GOOD)))
def test_a_call_that_is_cut_is_unclosed_with_its_name(cut: int) -> None:
    (call,) = parse(GOOD[:cut]).tool_calls
    assert call.status is CallStatus.UNCLOSED
    if cut > GOOD.index('"get_order"') + len('"get_order"'):
        assert call.name == "get_order"


def test_an_unclosed_call_ends_where_the_next_one_begins() -> None:
    first, second = parse(f'<tool_call>{{"name": "list_all", "arguments": {{}}}}{GOOD}').tool_calls
    assert (first.status, second.status) == (CallStatus.UNCLOSED, CallStatus.OK)


def test_reasoning_is_apart_and_its_unclosed_call_is_seen() -> None:
    reply = parse(f"<think>\nI should look.\n</think>\n\n{GOOD}")
    assert (reply.reasoning, reply.content, len(reply.ok_calls)) == ("I should look.", "", 1)
    reply = parse(f"I should look.\n</think>\n\nHello {GOOD}", in_reasoning=True)
    assert (reply.reasoning, reply.content, len(reply.ok_calls)) == ("I should look.", "Hello", 1)
    reply = parse(f"<think>I should look. {GOOD}")
    assert (reply.reasoning, len(reply.ok_calls)) == ("I should look. ", 1)
    reply = parse("<think>I should", in_reasoning=False)
    assert (reply.reasoning, reply.content, reply.reasoning_closed) == ("I should", "", False)


def test_a_call_that_is_weighed_in_closed_reasoning_is_no_call() -> None:
    reply = parse(f"<think>Shall I write {GOOD}? No.</think>Hello")
    assert reply.reasoning == f"Shall I write {GOOD}? No."
    assert (reply.content, reply.tool_calls) == ("Hello", ())


def test_no_reasoning_was_opened_and_none_is_closed() -> None:
    text = "Just text </think> with a tag"
    assert parse(text, in_reasoning=False).content == text
    assert parse("thought</think>text", in_reasoning=None).reasoning == "thought"


def test_a_closed_stream_takes_nothing_more() -> None:
    stream = get_parser("hermes").stream()
    stream.finish("x")
    with pytest.raises(ValueError, match="closed"):
        stream.feed("y")
