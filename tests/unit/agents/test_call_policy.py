"""`CallPolicy`: every attempted call gets exactly one answer, and nothing unreadable is
executed.
"""

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
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Action


def good(at: int) -> ToolCall:
    return ToolCall("look", {"at": str(at)}, "", id=f"c{at}")


def bad(at: int) -> ToolCall:
    return ToolCall("look", None, "{", CallStatus.INVALID_JSON, "not JSON", id=f"c{at}")


def reply(*calls: ToolCall, content: str = "") -> ParsedReply:
    return ParsedReply(content=content, tool_calls=calls)


POLICIES = st.builds(
    CallPolicy,
    on_invalid_call=st.sampled_from(["feedback", "respond", "stop"]),
    max_invalid_in_a_row=st.integers(1, 3),
    parallel_calls=st.sampled_from(["all", "first", "refuse"]),
)
CALLS = st.lists(st.booleans(), max_size=4).map(
    lambda kinds: [good(at) if ok else bad(at) for at, ok in enumerate(kinds)]
)


@given(POLICIES, CALLS, st.sampled_from(["", " ", "Hello."]), st.integers(0, 3))
def test_each_call_is_executed_or_answered_never_both(
    policy: CallPolicy, calls: list[ToolCall], content: str, before: int
) -> None:
    decision = policy.decide(reply(*calls, content=content), invalid_before=before)
    if decision.stop:
        assert decision.action is None
        return
    executed = (
        {calls.index(call) for call in decision.action.tool_calls} if decision.action else set()
    )
    answered = set(decision.answers)
    assert not executed & answered
    assert all(call.ok for call in (decision.action.tool_calls if decision.action else ()))
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


def test_text_that_looks_like_a_call_is_text_unless_the_policy_says_otherwise() -> None:
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
    first = CallPolicy(parallel_calls="first").decide(
        reply(good(0), good(1), good(2)), invalid_before=0
    )
    assert first.action == Action("", (good(0),))
    assert {key: found["content"] for key, found in first.answers.items()} == {
        1: ONE_CALL,
        2: ONE_CALL,
    }
    refused = CallPolicy(parallel_calls="refuse").decide(reply(good(0), good(1)), invalid_before=0)
    assert refused.action is None
    assert {found["content"] for found in refused.answers.values()} == {NO_PARALLEL}
    assert not refused.invalid


def test_answers_stand_in_the_order_of_the_calls() -> None:
    calls = [good(0), bad(1), good(2)]
    answers = CallPolicy().decide(reply(*calls), invalid_before=0).answers
    env: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "user", "content": "Well?"},
        {"role": "tool", "tool_call_id": "c0", "content": "zero"},
    ]
    assert [message.get("tool_call_id") for message in order_by_call(calls, answers, env)] == [
        "c0",
        "c1",
        "c2",
        None,
    ]


def test_calls_of_one_id_get_an_answer_each_in_their_order() -> None:
    """A model may write its ids itself, and one of them twice."""

    def twin(error: str) -> ToolCall:
        return ToolCall("look", None, "{", CallStatus.INVALID_JSON, error, id="c0")

    both = reply(twin("one"), twin("two"))
    answers = CallPolicy().decide(both, invalid_before=0).answers
    assert [message["content"] for message in order_by_call(both.tool_calls, answers, [])] == [
        "Error: one",
        "Error: two",
    ]

    mixed = reply(twin("one"), good(0), good(1), twin("two"))
    answers = CallPolicy().decide(mixed, invalid_before=0).answers
    env: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": f"c{at}", "content": f"good {at}"} for at in (1, 0)
    ]
    told_so = [message["content"] for message in order_by_call(mixed.tool_calls, answers, env)]
    assert told_so == ["Error: one", "good 0", "good 1", "Error: two"]


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
