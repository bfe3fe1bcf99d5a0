"""Convert environments with different interfaces to an `Environment`. The adapter for Gymnasium's
interface, `reset(seed=, options=) -> (obs, info)` and `step(action) -> (obs, reward, terminated,
truncated, info)`, is here; its episode's reward is the sum of the step rewards, like Gymnasium's
return. That for tau-bench's interface is in `tau_style`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolroll.agents.environments.one_action import OneActionEnvironment
from toolroll.agents.environments.tau_style import TauStyleEnvironment, is_tau_style
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Environment, Observation, Task, Tool


def as_environment(env: Any, *, wiki: str = "", tools_info: Sequence[Tool] = ()) -> Environment:
    """Return `env` if it is an `Environment`. If it has Gymnasium's or tau-bench's interface,
    return an adapter.

    Gymnasium's interface is `reset(seed=, options=)`, and `step(action)` with five values.
    tau-bench's is `reset(task_index)` and `step(action)`. The adapter uses `wiki` (the system
    message) and `tools_info` if `env` has none of its own. Raise `UsageError` for an object with
    another interface.
    """
    if isinstance(env, Environment):
        return env
    if is_gym_style(env):
        return GymStyleEnvironment(env, wiki=wiki, tools_info=tools_info)
    if is_tau_style(env):
        return TauStyleEnvironment(env, wiki=wiki, tools_info=tools_info)
    raise UsageError(
        f"{type(env).__name__} is not an environment: derive it from toolroll.Environment, "
        "or give it tau-bench's reset(task_index) and step(action), or Gymnasium's "
        "reset(seed=, options=) and step(action)"
    )


MakeGymAction = Callable[[str, ToolCall | None], Any]


def is_gym_style(env: Any) -> bool:
    """Return True if the `reset` of `env` takes `seed` and `options`, as in Gymnasium."""
    reset, step = getattr(env, "reset", None), getattr(env, "step", None)
    if not callable(reset) or not callable(step):
        return False
    try:
        names = set(inspect.signature(reset).parameters)
    except (TypeError, ValueError):
        return False
    return {"seed", "options"} <= names


def text_action(content: str, call: ToolCall | None) -> str:
    """Return the action for an environment that takes text. This is `content`, or the call as JSON:
    `{"name": ..., "arguments": ...}`.
    """
    if call is None:
        return content
    return json.dumps({"name": call.name, "arguments": call.arguments or {}}, ensure_ascii=False)


class GymStyleEnvironment(OneActionEnvironment):
    """Adapts `env`, an environment with Gymnasium's interface, to `Environment`.

    `make_action(content, call)` returns an action of `env`. It is called once per call, or once
    with None if the reply has no call. If it raises `ActionError`, the message becomes the
    observation. `env.reset` gets `options={"task_index": ..., "task_id": ...}`.

        env = GymStyleEnvironment(gymnasium.make("my/TextGame-v0"), wiki="Escape from the maze.")
        result = await agent.asolve(env, task_index=0)
    """

    reward_mode = "sum"

    def __init__(
        self,
        env: Any,
        *,
        wiki: str = "",
        tools_info: Sequence[Tool] = (),
        make_action: MakeGymAction = text_action,
    ) -> None:
        super().__init__(env, wiki, tools_info)
        self._make_action = make_action

    def reset(self, task: Task, seed: int) -> Observation:
        """Reset `env` with the seed and the task."""
        observation, info = self.env.reset(
            seed=seed, options={"task_index": task.index, "task_id": task.id}
        )
        return self.first(as_text(observation), dict(info))

    def make_one(self, content: str, call: ToolCall | None) -> Any:
        return self._make_action(content, call)

    def execute(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Step `env` with `action`, which `make_action` returned."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return as_text(observation), float(reward), bool(terminated or truncated), dict(info)

    def close(self) -> Any:
        """Close `env`. If its `close` is async, return the awaitable."""
        close = getattr(self.env, "close", None)
        return close() if callable(close) else None


def as_text(observation: Any) -> str:
    """Return an observation as a message's content. Text is returned unchanged, and anything else
    as JSON.
    """
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping | list | tuple | int | float | bool) or observation is None:
        return json.dumps(observation, ensure_ascii=False, default=str)
    return str(observation)
