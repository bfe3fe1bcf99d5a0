"""`OneActionEnvironment`: the base class of adapters for environments that take one action per
step.

Invariants: calls are executed in order until the episode is done, and later calls are refused. All
actions are created before the first one is executed. So if one of them cannot be created
(`ActionError`), nothing has changed. If a call raises `ActionError` after an earlier call was
executed, the error becomes the result of that one call, so that the results and rewards of the
other calls are not lost.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.agents.loop.call_policy import tool_message
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import ActionError
from toolroll.rollout.types import Action, Environment, Message, Observation, StepResult, Tool

NOT_EXECUTED = "Not executed: the conversation had ended with an earlier call of the same turn."


class OneActionEnvironment(Environment):
    """Adapts `env` to `Environment`. `wiki` (the system message) and `tools_info` are used if `env`
    has none of its own.
    """

    def __init__(self, env: Any, wiki: str, tools_info: Sequence[Tool]) -> None:
        self.env = env
        self._wiki = getattr(env, "wiki", None) or wiki
        self._tools = list(getattr(env, "tools_info", None) or tools_info)

    @abstractmethod
    def make_one(self, content: str, call: ToolCall | None) -> Any:
        """Return the environment's action for `call`, or for the text if there is no call."""

    @abstractmethod
    def execute(self, action: Any) -> tuple[Any, float, bool, Mapping[str, Any]]:
        """Step the environment. Return the observation, the reward, `done` and `info`."""

    def first(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        """Return an observation in which the wiki is the system message and `observation` is the
        user message.
        """
        messages: list[Message] = [{"role": "system", "content": self._wiki}] if self._wiki else []
        messages.append({"role": "user", "content": observation})
        return Observation(messages, self._tools, info)

    def step(self, action: Action) -> StepResult:
        """Execute each call in order, or the text if there are no calls."""
        if not action.tool_calls:
            if not action.content.strip():
                raise ActionError("Your reply was empty. Write something, or call a tool.")
            text, reward, done, info = self.execute(self.make_one(action.content, None))
            return StepResult([{"role": "user", "content": text}], reward, done, info=info)
        actions = [self.make_one(action.content, call) for call in action.tool_calls]
        messages: list[Message] = []
        total, done = 0.0, False
        infos: dict[str, Any] = {}
        for call, prepared in zip(action.tool_calls, actions, strict=True):
            if done:
                messages.append(tool_message(call, NOT_EXECUTED))
                continue
            try:
                observation, reward, done, info = self.execute(prepared)
            except ActionError as error:
                if not messages:
                    raise
                messages.append(tool_message(call, str(error)))
                continue
            total = total + reward if self.reward_mode == "sum" else reward
            infos |= info
            messages.append(tool_message(call, str(observation)))
        return StepResult(messages, total, done, info=infos)
