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
_RUNNER_LIMITS = {"max_turns", "episode_timeout", "pace_gc"}
_AGENT_LIMITS = {"step_timeout", "max_observation_bytes"}


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
    factory: EnvironmentFactory, tasks: Sequence[Task], run: Mapping[str, Any]
) -> Summary:
    """Play one do-nothing episode of each task, without an engine, and return their summary. `run`:
    the settings of the run, whose limits the episodes have.
    """
    summary = Summary(factory.name)
    limits = {name: run[name] for name in _RUNNER_LIMITS & run.keys()}
    settings = RunSettings(concurrency=_CONCURRENCY, **limits)
    agent_settings = {name: run[name] for name in _AGENT_LIMITS & run.keys()}
    make, threads = agent_maker("do-nothing"), Threads(_CONCURRENCY)
    options = EnvironmentOptions(user=lambda seed: LeavingUser())
    runner = Runner(factory, lambda: make(threads, agent_settings), settings, options)
    await runner.run(tasks, summary.add)
    return summary
