"""`CallPolicy`: each attempted call gets one answer, and nothing unreadable is executed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.agents.loop.call_policy import (
    NO_PARALLEL,
    ONE_CALL,
    CallPolicy,
    order_by_call,
    policy_of,
    reject_action,
)
from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
from toolroll.rollout.environment import Action
from toolroll.rollout.errors import UsageError


def good(number: int) -> ToolCall:
    return ToolCall("look", {"at": str(number)}, "", id=f"c{number}")


def bad(number: int, error: str = "not JSON") -> ToolCall:
    return ToolCall("look", None, "{", CallStatus.INVALID_JSON, error, id=f"c{number}")


def answer(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": content}


def reply(*calls: ToolCall, content: str = "") -> ParsedReply:
    return ParsedReply(content=content, tool_calls=calls)


POLICIES = st.builds(
    CallPolicy,
    on_invalid_call=st.sampled_from(["feedback", "respond", "stop"]),
    max_invalid_in_a_row=st.integers(1, 3),
    parallel_calls=st.sampled_from(["all", "first", "refuse"]),
)
CALLS = st.lists(st.booleans(), max_size=4).map(
    lambda kinds: [good(number) if ok else bad(number) for number, ok in enumerate(kinds)]
)


@given(POLICIES, CALLS, st.sampled_from(["", " ", "Hello."]), st.integers(0, 3))
def test_each_call_is_executed_or_answered_never_both(
    policy: CallPolicy, calls: list[ToolCall], content: str, before: int
) -> None:
    decision = policy.decide(reply(*calls, content=content), invalid_before=before)
    if decision.stop:
        assert decision.action is None
        return
    tool_calls = decision.action.tool_calls if decision.action else ()
    executed, answered = {calls.index(call) for call in tool_calls}, set(decision.answers)
    assert not executed & answered
    assert all(call.ok for call in tool_calls)
    spoken = decision.action is not None and not decision.action.tool_calls
    if spoken and decision.invalid:
        assert policy.on_invalid_call == "respond"
    else:
        assert executed | answered == set(range(len(calls)))
    assert decision.invalid == any(not call.ok for call in calls)


def test_feedback_tells_the_error_and_executes_the_rest() -> None:
    decision = CallPolicy().decide(reply(bad(0), good(1)), invalid_before=0)
    assert decision.answers[0]["content"] == "Error: not JSON"
    assert decision.action == Action("", (good(1),))


def test_respond_takes_the_text_as_speech_and_never_a_blank_one() -> None:
    policy = CallPolicy(on_invalid_call="respond")
    assert policy.decide(reply(bad(0), content="Hi."), invalid_before=0).action == Action("Hi.")
    assert policy.decide(reply(bad(0), content=" \n"), invalid_before=0).action is None


def test_stop_ends_at_the_first_and_any_policy_at_the_limit() -> None:
    assert CallPolicy(on_invalid_call="stop").decide(reply(bad(0)), invalid_before=0).stop
    assert not CallPolicy().decide(reply(bad(0)), invalid_before=1).stop
    assert CallPolicy().decide(reply(bad(0)), invalid_before=2).stop


def test_text_that_looks_like_a_call_is_text_by_default() -> None:
    look = ToolCall("look", None, "<look>", CallStatus.LOOKS_LIKE_A_CALL, "no call of look")
    text = replace(reply(content="<look>"), lookalikes=(look,))
    decision = CallPolicy().decide(text, invalid_before=0)
    assert (decision.action, decision.invalid) == (Action("<look>"), False)

    strict = CallPolicy(on_lookalike="invalid")
    refused = strict.decide(text, invalid_before=0)
    assert (refused.action, refused.invalid, refused.answers) == (None, True, {})
    assert refused.messages == [{"role": "user", "content": "Error: no call of look"}]
    assert strict.decide(text, invalid_before=2).stop
    assert replace(strict, on_invalid_call="respond").decide(text, invalid_before=0) == refused
    both = replace(reply(good(0)), lookalikes=(look,))
    assert not strict.decide(both, invalid_before=0).invalid


def test_of_several_calls_first_executes_one_and_refuse_none() -> None:
    calls = reply(good(0), good(1), good(2))
    first = CallPolicy(parallel_calls="first").decide(calls, invalid_before=0)
    assert first.action == Action("", (good(0),))
    contents = {number: message["content"] for number, message in first.answers.items()}
    assert contents == {1: ONE_CALL, 2: ONE_CALL}
    refused = CallPolicy(parallel_calls="refuse").decide(calls, invalid_before=0)
    assert (refused.action, refused.invalid) == (None, False)
    contents = {number: message["content"] for number, message in refused.answers.items()}
    assert contents == dict.fromkeys(range(3), NO_PARALLEL)


@pytest.mark.parametrize(
    ("calls", "messages", "contents"),
    [
        pytest.param(
            [good(0), bad(1), good(2)],
            [answer(2, "two"), {"role": "user", "content": "Well?"}, answer(0, "zero")],
            ["zero", "Error: not JSON", "two", "Well?"],
            id="in the order of the calls",
        ),
        pytest.param([bad(0, "a"), bad(0, "b")], [], ["Error: a", "Error: b"], id="one id twice"),
        pytest.param(
            [bad(0, "a"), good(0), good(1), bad(0, "b")],
            [answer(1, "good 1"), answer(0, "good 0")],
            ["Error: a", "good 0", "good 1", "Error: b"],
            id="one id three times",
        ),
    ],
)
def test_each_call_gets_its_answer_in_its_place(
    calls: list[ToolCall], messages: list[Any], contents: list[str]
) -> None:
    """A model may write its ids itself, and one of them twice."""
    answers = CallPolicy().decide(reply(*calls), invalid_before=0).answers
    ordered = order_by_call(calls, answers, messages)
    assert [message["content"] for message in ordered] == contents


def test_an_action_at_fault_is_told_so() -> None:
    messages = reject_action(Action("", (good(0), good(1))), "No.")
    assert [message["role"] for message in messages] == ["tool", "tool"]
    assert reject_action(Action("Hi."), "No.") == [{"role": "user", "content": "No."}]


@pytest.mark.parametrize(
    "settings",
    [{"max_invalid_in_a_row": 0}, {"invalid_penalty": 0.5}, {"on_lookalike": "call"}],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CallPolicy(**settings)


def test_a_setting_of_another_agent_is_refused() -> None:
    assert policy_of({"parallel_calls": "first"}) == CallPolicy(parallel_calls="first")
    with pytest.raises(UsageError, match="this agent has no setting 'command'"):
        policy_of({"command": "codex"})
