"""The do-nothing baseline: the score of an agent that says goodbye and calls no tool.

Such an agent solves many tasks of some benchmarks (tau-bench airline: 19 of 50), and training may
converge to it. So its score is reported beside each result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolroll.rollout.environment import EnvironmentFactory, EnvironmentOptions, Task, UserSimulator
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Tool

_CONCURRENCY = 8


class LeavingUser(UserSimulator):
    """A user who greets the agent, and leaves after the first reply (`###STOP###`, tau-bench's
    marker).
    """

    def adopt_tools(self, tools: Sequence[Tool], call: Callable[..., str]) -> None:
        """Ignore the tools."""

    async def reset(self, instruction: str) -> str:
        """Return a greeting."""
        return "Hello."

    async def step(self, content: str) -> str:
        """End the conversation."""
        return "###STOP###"


async def play_floor(
    factory: EnvironmentFactory,
    tasks: Sequence[Task],
    *,
    max_turns: int,
    episode_timeout: float | None = None,
    pace_gc: bool = True,
    limits: Mapping[str, Any] | None = None,
) -> Summary:
    """Play one do-nothing episode of each task, without an engine, and return their summary.
    `limits`: settings of the agent, such as `step_timeout`.
    """
    summary = Summary(factory.name)
    settings = RunSettings(
        concurrency=_CONCURRENCY,
        max_turns=max_turns,
        episode_timeout=episode_timeout,
        pace_gc=pace_gc,
    )
    make, threads = agent_maker("do-nothing"), Threads(_CONCURRENCY)
    options = EnvironmentOptions(user=lambda seed: LeavingUser())
    runner = Runner(factory, lambda: make(threads, limits or {}), settings, options)
    await runner.run(tasks, summary.add)
    return summary
