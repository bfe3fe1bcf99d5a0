"""Convert environments with different interfaces to an `Environment`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolroll.agents.environments.gymnasium import GymStyleEnvironment, is_gym_style
from toolroll.agents.environments.tau_style import TauStyleEnvironment, is_tau_style
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Environment, Tool


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
