"""Overridden published hooks, as a `Conversation` calls them."""

from __future__ import annotations

from typing import Any

import pytest

from toolroll.agents.loop.published_hooks import episode_arguments, wrap_parse_tool
from toolroll.parsers.types import CallStatus
from toolroll.rollout.errors import UsageError

PARSED = {"name": "look", "parameters": '{"at": "here"}'}


def parsed(*calls: dict[str, Any], text: str | None = "Hm.") -> Any:
    return wrap_parse_tool(
        lambda reply: {"parsed_result": {"normal_text": text, "calls": list(calls)}}
    )("raw")


def test_a_reply_that_an_override_parses() -> None:
    reply = parsed(PARSED, {"name": "look", "parameters": {"at": "there"}})
    assert reply.content == "Hm."
    assert [(call.name, call.arguments, call.status) for call in reply.tool_calls] == [
        ("look", {"at": "here"}, CallStatus.OK),
        ("look", {"at": "there"}, CallStatus.OK),
    ]
    assert parsed(text=None).content == ""


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ({"name": "look", "parameters": '{"at'}, CallStatus.INVALID_JSON),
        ({"name": "look", "parameters": "[1]"}, CallStatus.BAD_ARGUMENTS),
        ({"name": "look", "parameters": None}, CallStatus.BAD_ARGUMENTS),
        ({"name": "look"}, CallStatus.BAD_ARGUMENTS),
        ({"name": "", "parameters": "{}"}, CallStatus.MISSING_NAME),
    ],
)
def test_a_call_that_cannot_be_executed(call: dict[str, Any], status: CallStatus) -> None:
    good, bad = parsed(PARSED, call).tool_calls
    assert good.ok
    assert (bad.status, bad.ok) == (status, False)
    assert bad.error


def test_a_reply_that_an_override_could_not_parse() -> None:
    parse = wrap_parse_tool(lambda reply: {"success": False, "error": "no end tag"})
    (call,) = parse("<tool_call>").tool_calls
    assert (call.status, call.error, call.raw) == (
        CallStatus.INVALID_JSON,
        "no end tag",
        "<tool_call>",
    )


def test_a_number_is_no_task() -> None:
    with pytest.raises(UsageError, match="task=99 is no Task: a number is the argument task_index"):
        episode_arguments(object(), None, 99, None, None)  # type: ignore[arg-type]
