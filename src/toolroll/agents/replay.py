"""`ReplayAgent`: plays a recorded episode again, without a model.

It repeats the recorded replies, and `ReplayUser` the recorded lines of the simulated user. So only
the environment may answer differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.loop.play import Played
from toolroll.agents.loop.result import build_result, rewarded
from toolroll.agents.text_agent import TextAgent
from toolroll.parsers.openai import from_openai
from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
from toolroll.rollout.errors import UsageError, UserSimulatorError
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runtime.threads import BlockingRunner
from toolroll.rollout.types import InteractionResult, Message, StopReason, Tool


class Recording:
    """The messages of `recorded`, an episode, and how many of its replies were repeated.

    `replies` are the positions of the model's messages. (An environment may begin with messages of
    the assistant, which are not replies.)
    """

    def __init__(self, recorded: InteractionResult) -> None:
        self.recorded = recorded
        self.repeated = 0
        assistant = [
            position
            for position, message in enumerate(recorded.messages)
            if message.get("role") == "assistant"
        ]
        turns = int(recorded.metrics.get("turns", len(assistant)))
        self.replies = assistant[len(assistant) - turns :]

    def next_reply(self) -> AssistantTurn:
        """Return the next recorded reply."""
        position = self.replies[self.repeated]
        self.repeated += 1
        message = self.recorded.messages[position]
        last = self.repeated == len(self.replies)
        cut = last and self.recorded.stop_reason is StopReason.LENGTH
        return AssistantTurn(
            self._parsed(position, message), dict(message), "length" if cut else "stop"
        )

    def next_line(self) -> str:
        """Return the user's line after the latest reply, or the line before the first reply."""
        messages = self.recorded.messages
        ends = [*self.replies, len(messages)]
        start = self.replies[self.repeated - 1] + 1 if self.repeated else 0
        lines = [
            message["content"]
            for message in messages[start : ends[self.repeated]]
            if message.get("role") == "user"
        ]
        if not lines:
            raise UserSimulatorError("the recording has no line of the user here")
        return str(lines[-1])

    def _parsed(self, position: int, message: Message) -> ParsedReply:
        reply = from_openai(message)
        bad = {
            found["call"]: CallStatus(found["status"])
            for found in self.recorded.info.get("bad_calls", ())
            if found["message"] == position
        }
        calls = [
            replace(call, status=bad.get(index, CallStatus.OK), error=self._answer(position, call))
            for index, call in enumerate(reply.tool_calls)
        ]
        return replace(reply, tool_calls=tuple(calls))

    def _answer(self, position: int, call: ToolCall) -> str:
        """Return the recorded answer to `call`. If it was invalid, this is the error."""
        answers = (
            str(message.get("content"))
            for message in self.recorded.messages[position + 1 :]
            if message.get("tool_call_id") == call.id
        )
        return next(answers, "").removeprefix("Error: ")


class ReplayUser:
    """Repeats the user's lines of `recording`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def adopt_tools(self, tools: Sequence[Tool], call: Callable[..., str]) -> None:
        """Raise `UserSimulatorError`, because the calls of a user are not recorded."""
        raise UserSimulatorError("the user has tools, and an episode does not record their calls")

    async def reset(self, instruction: str) -> str:
        """Return the first line."""
        return self._recording.next_line()

    async def step(self, content: str) -> str:
        """Return the line that followed the latest reply."""
        return self._recording.next_line()

    def metrics(self) -> Mapping[str, float]:
        """Return no metrics."""
        return {}

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(eq=False)
class ReplayAgent(TextAgent):
    """Plays the replies of `recording`, which must be new for each episode."""

    _: KW_ONLY
    recording: Recording

    @property
    def turns(self) -> int:
        """The number of recorded replies."""
        return len(self.recording.replies)

    @property
    def user(self) -> ReplayUser:
        """The user of the recording."""
        return ReplayUser(self.recording)

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
        again = build_result(played)
        sequences = rewarded(self.recording.recorded.trajectories, played.turn_rewards)
        return replace(again, trajectories=sequences)


def make_replay(threads: BlockingRunner, settings: Mapping[str, Any]) -> ReplayAgent:
    """Return the agent of the entry point `replay` in the group `toolroll.agents`, for one episode.

    `settings`: `recorded`, the result of the episode, and the settings of the recorded agent, of
    which those in `_RULES` and `_LIMITS` have an effect. Raise `UsageError` without `recorded`.
    """
    if "recorded" not in settings:
        raise UsageError("the agent replay has no episode to repeat: use toolroll regrade")
    rules = {name: settings[name] for name in _RULES if settings.get(name) is not None}
    limits = {name: settings[name] for name in _LIMITS if settings.get(name) is not None}
    recording = Recording(settings["recorded"])
    return ReplayAgent(threads, policy=CallPolicy(**rules), recording=recording, **limits)


_RULES = ("on_invalid_call", "parallel_calls")
_LIMITS = ("step_timeout", "max_observation_bytes")
