"""`CallPolicy`: how an agent handles invalid calls, and several calls in one reply.

A call is invalid if its `CallStatus` is not OK: it cannot be parsed, names an unknown tool, or has
arguments that violate the tool's schema. A reply is invalid if it contains an invalid call. Text
that looks like a call is not a call; `on_lookalike` says what it is.

Invariants:

- Each call, even an invalid one, gets exactly one tool message, unless the reply ends the episode.
  If the call was not executed, the message gives the reason.
- The environment never gets reasoning or an invalid call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from toolroll.parsers.types import ParsedReply, ToolCall
from toolroll.rollout.environment import Action, Environment, ParallelCalls
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Message

OnInvalidCall = Literal["feedback", "respond", "stop"]
OnLookalike = Literal["text", "invalid"]

ONE_CALL = "Not executed: only one tool call per turn is allowed, and another one came before it."
NO_PARALLEL = (
    "Not executed: only one tool call per turn is allowed. Make one call and wait for its answer."
)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a reply.

    Attributes:
        action: The action for the environment, if any.
        answers: The tool messages that the agent itself writes. Each key is the index of a call in
            the reply, and not a call id, because ids may repeat.
        messages: Further messages that the agent itself writes.
        stop: True to end the episode.
        invalid: True if the reply had an invalid call.
    """

    action: Action | None
    answers: Mapping[int, Message] = field(default_factory=dict)
    stop: bool = False
    invalid: bool = False
    messages: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """An agent's rules for the calls in a reply.

    Args:
        on_invalid_call: "feedback" answers each invalid call with its error, and executes the valid
            calls. "respond" does the same, and if a reply has text and no valid call, also sends
            this text to the user (as slime's tau-bench example does). "stop" ends the episode.
        max_invalid_in_a_row: the episode always ends after this many invalid replies in a row.
        parallel_calls: what to do with several valid calls in one reply. "all" executes them in
            order. "first" refuses all but the first (tau-bench's rule). "refuse" executes none.
            None uses the environment's rule.
        invalid_penalty: a number that is added to the reward for each invalid reply, 0 or negative.
        mask_invalid: True excludes invalid replies from training.
        on_lookalike: what to do with a reply that has no call, but text that looks like one
            (`ParsedReply.lookalikes`). "text" sends it to the environment like any text. "invalid"
            makes the reply invalid; the model gets the reason as a user message, also if
            `on_invalid_call` is "respond".

    Example: `CallPolicy(parallel_calls="first", invalid_penalty=-0.1, mask_invalid=True)`.
    """

    on_invalid_call: OnInvalidCall = "feedback"
    max_invalid_in_a_row: int = 3
    parallel_calls: ParallelCalls | None = None
    invalid_penalty: float = 0.0
    mask_invalid: bool = False
    on_lookalike: OnLookalike = "text"

    def __post_init__(self) -> None:
        if self.max_invalid_in_a_row < 1:
            raise UsageError(
                f"max_invalid_in_a_row must be at least 1, not {self.max_invalid_in_a_row}"
            )
        if self.parallel_calls is not None:
            _check_rule("parallel_calls", self.parallel_calls)
        _check_rule("on_lookalike", self.on_lookalike, OnLookalike)
        if self.invalid_penalty > 0:
            raise UsageError(
                f"invalid_penalty is added to the reward: give 0 or a negative number, not "
                f"{self.invalid_penalty}"
            )

    def under(self, environment: Environment) -> CallPolicy:
        """Return this policy if it has a rule for parallel calls. Otherwise return a copy with the
        environment's rule.

        Raises `UsageError` if the environment's rule is not valid.
        """
        if self.parallel_calls is not None:
            return self
        _check_rule(f"{type(environment).__name__}.parallel_calls", environment.parallel_calls)
        return replace(self, parallel_calls=environment.parallel_calls)

    def decide(self, reply: ParsedReply, *, invalid_before: int) -> Decision:
        """Return what to do with `reply`. `invalid_before`: the number of invalid replies directly
        before it.
        """
        misread = self.on_lookalike == "invalid" and reply.lookalikes and not reply.tool_calls
        if reply.bad_calls or misread:
            return self._decide_invalid(reply, invalid_before + 1)
        return self._execute(reply, {})

    def _decide_invalid(self, reply: ParsedReply, in_a_row: int) -> Decision:
        if self.on_invalid_call == "stop" or in_a_row >= self.max_invalid_in_a_row:
            return Decision(None, stop=True, invalid=True)
        if not reply.tool_calls:
            text = f"Error: {reply.lookalikes[0].error}"
            return Decision(None, invalid=True, messages=[{"role": "user", "content": text}])
        bad = [(index, call) for index, call in enumerate(reply.tool_calls) if not call.ok]
        if self.on_invalid_call == "respond" and reply.content.strip() and not reply.ok_calls:
            answers = {
                index: tool_message(call, call.error or "This call could not be read.")
                for index, call in bad
            }
            return Decision(Action(reply.content), answers, invalid=True)
        answers = {
            index: tool_message(call, f"Error: {call.error or 'this call could not be read.'}")
            for index, call in bad
        }
        if not reply.ok_calls:
            return Decision(None, answers, invalid=True)
        return replace(self._execute(reply, answers), invalid=True)

    def _execute(self, reply: ParsedReply, answers: Mapping[int, Message]) -> Decision:
        calls = [(index, call) for index, call in enumerate(reply.tool_calls) if call.ok]
        if len(calls) <= 1 or self.parallel_calls in (None, "all"):
            return Decision(Action(reply.content, tuple([call for _, call in calls])), answers)
        if self.parallel_calls == "first":
            refused = {index: tool_message(call, ONE_CALL) for index, call in calls[1:]}
            return Decision(Action(reply.content, (calls[0][1],)), {**answers, **refused})
        return Decision(
            None, {**answers, **{index: tool_message(call, NO_PARALLEL) for index, call in calls}}
        )


def _check_rule(setting: str, rule: object, rules: Any = ParallelCalls) -> None:
    if rule not in get_args(rules):
        raise UsageError(f"{setting} must be one of {get_args(rules)}, not {rule!r}")


def pop_settings(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove the keys `names` from an agent's `settings`, which leaves the fields of `CallPolicy`.
    Return the removed items.
    """
    return {name: settings.pop(name) for name in names if name in settings}


def policy_of(settings: Mapping[str, Any]) -> CallPolicy:
    """Return the policy with the fields `settings`. Raise `UsageError` for other names."""
    for name in settings.keys() - {rule.name for rule in fields(CallPolicy)}:
        raise UsageError(f"this agent has no setting {name!r}")
    return CallPolicy(**settings)


ONE_CALL_A_TURN = CallPolicy(parallel_calls="first")
"""The rule of slime's tau-bench example: one call per turn, even if the environment allows more."""


def tool_message(call: ToolCall, text: str) -> Message:
    """Return a tool message that answers `call` with `text`."""
    return {
        "role": "tool",
        "tool_call_id": call.id,
        "name": call.name or "unknown",
        "content": text,
    }


def order_by_call(
    calls: Sequence[ToolCall], answers: Mapping[int, Message], messages: Sequence[Message]
) -> list[Message]:
    """Return the environment's `messages` and the agent's own `answers`: first the tool messages in
    the order of the calls, then the rest.
    """
    tools = [message for message in messages if message.get("role") == "tool"]
    ordered: list[Message] = []
    for position, call in enumerate(calls):
        if position in answers:
            ordered.append(answers[position])
            continue
        for index, message in enumerate(tools):
            if message.get("tool_call_id") == call.id:
                ordered.append(tools.pop(index))
                break
    return ordered + tools + [message for message in messages if message.get("role") != "tool"]


def reject_action(action: Action, text: str) -> list[Message]:
    """Return `text` as a tool message for each call in `action`, or as one user message if `action`
    has no calls.
    """
    if action.tool_calls:
        return [tool_message(call, text) for call in action.tool_calls]
    return [{"role": "user", "content": text}]
