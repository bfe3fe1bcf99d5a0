"""`TextAgent`: an agent that returns only text. It is played and scored like any other agent, but
its episodes have no tokens and cannot be trained on.

Invariants: the loop, the policy for invalid calls and the rewards are the same as for
`TrainableAgentMixin`. There is no trajectory, and `info["trainable"]` is False.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.loop.environment_results import MOST_BYTES
from toolroll.agents.loop.episode_agent import EpisodeAgent
from toolroll.agents.loop.play import EpisodeConversation, Played, build_result
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.environment import Environment, Observation
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runtime.threads import BlockingRunner
from toolroll.rollout.types import Message, Tool

DEFAULT_POLICY = CallPolicy()


class TextConversation(EpisodeConversation):
    """The conversation of one episode, as messages without token ids. It is never trained, so
    there is nothing to exclude or to check.
    """

    def __init__(self, agent: TextAgent, first: Observation, session_id: str) -> None:
        self.messages: list[Message] = [dict(message) for message in first.messages]
        self.tools: list[Tool] = list(first.tools)
        self._agent = agent
        self._session_id = session_id

    async def reply(self, sampling_params: Mapping[str, Any]) -> AssistantTurn:
        """Return the agent's next turn and append its message."""
        turn = await self._agent.reply(self.messages, self.tools, sampling_params, self._session_id)
        self.messages.append(turn.message)
        return turn

    def extend(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> None:
        """Add the environment's messages, and `tools` if they changed."""
        self.messages += messages
        if tools is not None:
            self.tools[:] = tools


@dataclass(eq=False)
class TextAgent(EpisodeAgent[TextConversation]):
    """An agent whose `reply` returns text.

        class Shouting(TextAgent):
            async def reply(self, messages, tools, sampling_params, session_id):
                text = str(messages[-1]["content"]).upper()
                return AssistantTurn(ParsedReply(text), {"role": "assistant", "content": text})

        result = await Shouting(Threads(8)).asolve(env, task=task)

    `threads` runs blocking environments. See `EpisodeAgent` for the limits.
    """

    threads: BlockingRunner
    _: KW_ONLY
    policy: CallPolicy = DEFAULT_POLICY
    step_timeout: float | None = None
    max_observation_bytes: int = MOST_BYTES

    @abstractmethod
    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling_params: Mapping[str, Any],
        session_id: str,
    ) -> AssistantTurn:
        """Return the model's next turn for the conversation `messages` with `tools`, both in
        OpenAI's format. `session_id` is the same for all turns of an episode.
        """

    @property
    def blocking_runner(self) -> BlockingRunner:
        return self.threads

    async def converse(
        self, environment: Environment, first: Observation, name: str, max_num_steps: int
    ) -> TextConversation:
        return TextConversation(self, first, name)

    def result(self, played: Played[TextConversation]) -> InteractionResult:
        return build_result(played, trainable=False)


class DoNothingAgent(TextAgent):
    """An agent that says goodbye and calls no tool. Its score is the lower bound of a benchmark."""

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling_params: Mapping[str, Any],
        session_id: str,
    ) -> AssistantTurn:
        return AssistantTurn(ParsedReply(FAREWELL), {"role": "assistant", "content": FAREWELL})


FAREWELL = "Goodbye."


def make_do_nothing(threads: BlockingRunner, settings: Mapping[str, Any]) -> DoNothingAgent:
    """Return the agent of the entry point `do-nothing` in the group `toolroll.agents`.

    Only `step_timeout` and `max_observation_bytes` of `settings` have an effect.
    """
    names = ("step_timeout", "max_observation_bytes")
    return DoNothingAgent(threads, **{name: settings[name] for name in names if name in settings})
