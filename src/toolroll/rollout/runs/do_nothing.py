"""The do-nothing floor: what an agent scores that says goodbye and calls nothing.

On some benchmarks that is a good part of the tasks (tau-bench airline: 19 of 50), and training
finds it; so it stands beside each result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.runs.runner import Runner, RunSettings
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import EnvironmentFactory, EnvironmentOptions, Task, Tool

_CONCURRENCY = 8


class LeavingUser:
    """A user who greets, and leaves at the first answer (`###STOP###`, tau-bench's marker)."""

    def adopt_tools(self, tools: Sequence[Tool], call: Callable[..., str]) -> None:
        """Tools are not touched."""

    async def reset(self, instruction: str) -> str:
        """A greeting."""
        return "Hello."

    async def step(self, content: str) -> str:
        """The end."""
        return "###STOP###"

    def metrics(self) -> Mapping[str, float]:
        """Nothing is counted."""
        return {}

    async def close(self) -> None:
        """Do nothing: there are no resources to release."""


async def play_floor(
    factory: EnvironmentFactory,
    tasks: Sequence[Task],
    *,
    max_num_steps: int,
    episode_timeout: float | None = None,
    pace_gc: bool = True,
    limits: Mapping[str, Any] | None = None,
) -> Summary:
    """Play one do-nothing episode of each task; no engine is asked. `limits`: the agent's
    settings.
    """
    summary = Summary(factory.name)
    settings = RunSettings(
        concurrency=_CONCURRENCY,
        max_num_steps=max_num_steps,
        episode_timeout=episode_timeout,
        pace_gc=pace_gc,
    )
    make = agent_maker("do-nothing")
    threads = Threads(_CONCURRENCY)
    options = EnvironmentOptions(user=lambda seed: LeavingUser())
    runner = Runner(factory, lambda: make(threads, limits or {}), settings, options)
    await runner.run(tasks, summary.add)
    return summary
