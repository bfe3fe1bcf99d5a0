"""Environments of Gymnasium's kind behind our `Environment`: `reset(seed=, options=) -> (obs,
info)`, `step(action) -> (obs, reward, terminated, truncated, info)`, one action a step.

Invariants: calls are executed in order until the episode is over; nothing is stepped behind its
end; the episode's reward is the sum of the steps', as Gymnasium's return is.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolroll.agents.environments.tau_style import NOT_EXECUTED
from toolroll.agents.loop.call_policy import answer
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import ActionError
from toolroll.rollout.types import Action, Environment, Message, Observation, StepResult, Task, Tool

MakeGymAction = Callable[[str, ToolCall | None], Any]


def is_gym_style(env: Any) -> bool:
    """Whether `env`'s `reset` takes `seed` and `options`, as Gymnasium's does."""
    reset, step = getattr(env, "reset", None), getattr(env, "step", None)
    if not callable(reset) or not callable(step):
        return False
    try:
        names = set(inspect.signature(reset).parameters)
    except (TypeError, ValueError):
        return False
    return {"seed", "options"} <= names


def text_action(content: str, call: ToolCall | None) -> str:
    """The action of an environment that takes text: what was said, or a call as `{"name": ...,
    "arguments": ...}`.
    """
    return (
        content
        if call is None
        else json.dumps({"name": call.name, "arguments": call.arguments or {}}, ensure_ascii=False)
    )


class GymStyleEnvironment(Environment):
    """`env` as it is. `make_action(content, call)` builds its action, once for each call, or with
    None where the reply has no call; an `ActionError` of it goes back to the model. `options` given
    to `reset`: `{"task_index": ..., "task_id": ...}`."""

    reward_mode = "sum"

    def __init__(
        self,
        env: Any,
        *,
        wiki: str = "",
        tools_info: Sequence[Tool] = (),
        make_action: MakeGymAction = text_action,
    ) -> None:
        self.env = env
        self._wiki = getattr(env, "wiki", None) or wiki
        self._tools = list(getattr(env, "tools_info", None) or tools_info)
        self._make_action = make_action

    def reset(self, task: Task, seed: int) -> Observation:
        """The wiki as the system message, the observation as the user's."""
        observation, info = self.env.reset(
            seed=seed, options={"task_index": task.index, "task_id": task.id}
        )
        messages: list[Message] = [{"role": "system", "content": self._wiki}] if self._wiki else []
        messages.append({"role": "user", "content": as_text(observation)})
        return Observation(messages, self._tools, dict(info))

    def step(self, action: Action) -> StepResult:
        """Each call in order; without calls, the text."""
        if not action.tool_calls:
            if not action.content.strip():
                raise ActionError("Your reply was empty. Write something, or call a tool.")
            text, reward, done, info = self._step(self._make_action(action.content, None))
            return StepResult([{"role": "user", "content": text}], reward, done, info=info)
        actions = [self._make_action(action.content, call) for call in action.tool_calls]
        messages: list[Message] = []
        total, done = 0.0, False
        found: dict[str, Any] = {}
        for call, one in zip(action.tool_calls, actions, strict=True):
            if done:
                messages.append(answer(call, NOT_EXECUTED))
                continue
            text, reward, done, info = self._step(one)
            total += reward
            found |= info
            messages.append(answer(call, text))
        return StepResult(messages, total, done, info=found)

    def _step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return as_text(observation), float(reward), bool(terminated or truncated), dict(info)

    def close(self) -> None:
        """Close `env`."""
        close = getattr(self.env, "close", None)
        if callable(close):
            close()


def as_text(observation: Any) -> str:
    """An observation as a message's content: text as it is, anything else as JSON."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping | list | tuple | int | float | bool) or observation is None:
        return json.dumps(observation, ensure_ascii=False, default=str)
    return str(observation)
