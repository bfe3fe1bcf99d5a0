"""`ReplayAgent`: plays a recorded episode again, without a model.

It repeats the recorded replies, and `Recording` the lines of the simulated user. So only the
environment may answer differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

from toolroll.agents.loop.call_policy import CallPolicy, pop_settings
from toolroll.agents.loop.play import Played, build_result, rewarded
from toolroll.agents.text_agent import TextAgent
from toolroll.parsers.openai import from_openai
from toolroll.parsers.reading.lookalike import LOOKALIKE
from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
from toolroll.rollout.environment import UserSimulator
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import RolloutError, UsageError, UserSimulatorError
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runtime.threads import BlockingRunner
from toolroll.rollout.types import Message, StopReason, Tool


class Recording(UserSimulator):
    """The messages of `recorded`, an episode, and its simulated user, who repeats their lines.

    `repeated` counts the replies that were repeated. `replies` are the positions of all of them.
    (An environment may begin with messages of the assistant, which are not replies. The calls of a
    user who has tools are not recorded, so such a user cannot be repeated.)
    """

    def __init__(self, recorded: InteractionResult) -> None:
        self.recorded = recorded
        self.repeated = 0
        roles = [message.get("role") for message in recorded.messages]
        assistant = [position for position, role in enumerate(roles) if role == "assistant"]
        turns = int(recorded.metrics.get("turns", len(assistant)))
        if turns > len(assistant):
            raise RolloutError(f"{turns} turns, but only {len(assistant)} replies are recorded")
        self.replies = assistant[len(assistant) - turns :]

    def next_reply(self) -> AssistantTurn:
        """Return the next recorded reply."""
        position = self.replies[self.repeated]
        self.repeated += 1
        last = self.repeated == len(self.replies)
        cut = last and self.recorded.stop_reason in (StopReason.LENGTH, StopReason.PLACEHOLDER)
        message = dict(self.recorded.messages[position])
        finish_reason = self.recorded.stop_reason.value if cut else "stop"
        return AssistantTurn(self._parsed(position), message, finish_reason)

    def _parsed(self, position: int) -> ParsedReply:
        messages = self.recorded.messages
        reply = from_openai(messages[position])
        bad = {
            bad_call["call"]: CallStatus(bad_call["status"])
            for bad_call in self.recorded.info.get("bad_calls", ())
            if bad_call["message"] == position
        }
        answers = {
            message["tool_call_id"]: str(message.get("content")).removeprefix("Error: ")
            for message in reversed(messages[position + 1 :])
            if "tool_call_id" in message
        }
        calls = [
            replace(call, status=bad.get(index, CallStatus.OK), error=answers.get(call.id))
            for index, call in enumerate(reply.tool_calls)
        ]
        return replace(reply, tool_calls=tuple(calls), lookalikes=self._lookalikes(position))

    def _lookalikes(self, position: int) -> tuple[ToolCall, ...]:
        """Return the text for which a reply without calls was invalid, if it was: the loop answered
        it with this error, or ended the episode.
        """
        messages = self.recorded.messages[position + 1 :]
        ended = not messages and self.recorded.stop_reason is StopReason.INVALID_CALLS
        error = str(messages[0].get("content")).removeprefix("Error: ") if messages else ""
        if not ended and not error.startswith(LOOKALIKE):
            return ()
        return (ToolCall("", None, "", CallStatus.LOOKS_LIKE_A_CALL, error),)

    async def reset(self, instruction: str) -> str:
        """Return the user's line before the first reply."""
        return self._line(0, self.replies[0])

    async def step(self, content: str) -> str:
        """Return the user's line after the latest reply."""
        ends = [*self.replies, len(self.recorded.messages)]
        return self._line(ends[self.repeated - 1] + 1, ends[self.repeated])

    def _line(self, start: int, stop: int) -> str:
        for message in reversed(self.recorded.messages[start:stop]):
            if message.get("role") == "user":
                return str(message["content"])
        raise UserSimulatorError("the recording has no line of the user here")


@dataclass(eq=False)
class ReplayAgent(TextAgent):
    """Plays the replies of `recording`, which must be new for each episode."""

    _: KW_ONLY
    recording: Recording

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling_params: Mapping[str, Any],
        session_id: str,
    ) -> AssistantTurn:
        return self.recording.next_reply()

    def result(self, played: Played[Any]) -> InteractionResult:
        """Return the result with the recorded sequences, whose turns have the new rewards."""
        sequences = rewarded(self.recording.recorded.trajectories, played.turn_rewards)
        return replace(build_result(played), trajectories=sequences)


def make_replay(threads: BlockingRunner, settings: Mapping[str, Any]) -> ReplayAgent:
    """Return the agent of the entry point `replay` in the group `toolroll.agents`, for one episode.

    `settings`: `recorded`, the result of the episode, and the settings of the recorded agent. Raise
    `UsageError` without `recorded`.
    """
    if "recorded" not in settings:
        raise UsageError("the agent replay has no episode to repeat: use toolroll regrade")
    values = {**settings, **settings.get("agent_args", {})}
    names = ("step_timeout", "max_observation_bytes", *(rule.name for rule in fields(CallPolicy)))
    policy = {name: values[name] for name in names if values.get(name) is not None}
    limits = pop_settings(policy, "step_timeout", "max_observation_bytes")
    recording = Recording(settings["recorded"])
    return ReplayAgent(threads, policy=CallPolicy(**policy), recording=recording, **limits)
