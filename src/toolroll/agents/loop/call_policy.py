"""`CallPolicy`: what an agent does with calls that cannot be read, and with several calls in one
reply.

Invariants: every attempted call gets exactly one answer, so that tokens and history agree; a call
that is not executed is told so in words; nothing blank and no reasoning is ever handed to the
environment as speech.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from toolroll.parsers.types import ParsedReply, ToolCall
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Action, Environment, Message, ParallelCalls

OnInvalidCall = Literal["feedback", "respond", "stop"]

ONE_CALL = "Not executed: only one tool call per turn is allowed, and another one stood before it."
NO_PARALLEL = (
    "Not executed: only one tool call per turn is allowed. Make one call and wait for its answer."
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a reply: the `action` for the environment (None: nothing), the `answers` that
    the agent gives itself, by the call's place in the reply (two calls may have one id), whether to
    `stop`, and whether the reply was `invalid`."""

    action: Action | None
    answers: Mapping[int, Message] = field(default_factory=dict)
    stop: bool = False
    invalid: bool = False


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """What an agent does with invalid calls, and with several calls in one turn.

    Args:
        on_invalid_call: "feedback" answers each invalid call with its error; "respond" sends the
            turn's text to the user (the published behavior); "stop" ends the episode.
        max_invalid_in_a_row: So many invalid turns in a row end the episode in any case.
        parallel_calls: "all" executes the calls of a turn in order, "first" executes the first one
            and refuses the others, "refuse" executes none if there are several. None: the rule of
            the environment (`Environment.parallel_calls`).
        invalid_penalty: Added to the reward for each invalid turn; 0 or negative.
        mask_invalid: Take invalid turns out of training.
    """

    on_invalid_call: OnInvalidCall = "feedback"
    max_invalid_in_a_row: int = 3
    parallel_calls: ParallelCalls | None = None
    invalid_penalty: float = 0.0
    mask_invalid: bool = False

    def __post_init__(self) -> None:
        if self.max_invalid_in_a_row < 1:
            raise UsageError(
                f"max_invalid_in_a_row must be at least 1, not {self.max_invalid_in_a_row}"
            )
        if self.invalid_penalty > 0:
            raise UsageError(
                f"invalid_penalty is added to the reward: give 0 or a negative number, not "
                f"{self.invalid_penalty}"
            )

    def under(self, environment: Environment) -> CallPolicy:
        """Return the policy with the rule of `environment` for parallel calls, if it has none of
        its own.
        """
        if self.parallel_calls is not None:
            return self
        return replace(self, parallel_calls=environment.parallel_calls)

    def decide(self, reply: ParsedReply, *, invalid_before: int) -> Decision:
        """`invalid_before`: how many replies just before this one were invalid."""
        if reply.bad_calls:
            return self._decide_invalid(reply, invalid_before + 1)
        return self._execute(reply, {})

    def _decide_invalid(self, reply: ParsedReply, in_a_row: int) -> Decision:
        if self.on_invalid_call == "stop" or in_a_row >= self.max_invalid_in_a_row:
            return Decision(None, stop=True, invalid=True)
        bad = [(at, call) for at, call in enumerate(reply.tool_calls) if not call.ok]
        if self.on_invalid_call == "respond" and reply.content.strip() and not reply.ok_calls:
            answers = {
                at: answer(call, call.error or "This call could not be read.") for at, call in bad
            }
            return Decision(Action(reply.content), answers, invalid=True)
        answers = {
            at: answer(call, f"Error: {call.error or 'this call could not be read.'}")
            for at, call in bad
        }
        if not reply.ok_calls:
            return Decision(None, answers, invalid=True)
        done = self._execute(reply, answers)
        return Decision(done.action, done.answers, invalid=True)

    def _execute(self, reply: ParsedReply, answers: Mapping[int, Message]) -> Decision:
        calls = [(at, call) for at, call in enumerate(reply.tool_calls) if call.ok]
        if len(calls) <= 1 or self.parallel_calls in (None, "all"):
            return Decision(Action(reply.content, reply.ok_calls), answers)
        if self.parallel_calls == "first":
            refused = {at: answer(call, ONE_CALL) for at, call in calls[1:]}
            return Decision(Action(reply.content, (calls[0][1],)), {**answers, **refused})
        return Decision(None, {**answers, **{at: answer(call, NO_PARALLEL) for at, call in calls}})


ONE_CALL_A_TURN = CallPolicy(parallel_calls="first")
"""The published rule: one call in each turn, whatever the environment allows."""


def answer(call: ToolCall, text: str) -> Message:
    """A tool message that answers `call` with `text`."""
    return {
        "role": "tool",
        "tool_call_id": call.id,
        "name": call.name or "unknown",
        "content": text,
    }


def order_by_call(
    calls: Sequence[ToolCall], answers: Mapping[int, Message], messages: Sequence[Message]
) -> list[Message]:
    """The environment's `messages` and the agent's own `answers`, tool messages in the order of
    the calls, the rest behind.
    """
    tools = [message for message in messages if message.get("role") == "tool"]
    ordered: list[Message] = []
    for at, call in enumerate(calls):
        if at in answers:
            ordered.append(answers[at])
            continue
        own = next(
            (
                index
                for index, message in enumerate(tools)
                if message.get("tool_call_id") == call.id
            ),
            None,
        )
        if own is not None:
            ordered.append(tools.pop(own))
    return ordered + tools + [message for message in messages if message.get("role") != "tool"]


def told(action: Action, text: str) -> list[Message]:
    """`text` as the answer to every call of `action`; to the user's side of the conversation
    where it made none.
    """
    if action.tool_calls:
        return [answer(call, text) for call in action.tool_calls]
    return [{"role": "user", "content": text}]
