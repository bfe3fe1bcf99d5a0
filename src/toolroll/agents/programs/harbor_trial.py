"""`HarborTrial`: a task whose agent and verifier Harbor runs, in an interpreter of its own."""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from toolroll.agents.environments.harbor import HarborTask, read_rewards, the_reward
from toolroll.agents.environments.sandboxed import SandboxEnvironment
from toolroll.rollout.errors import EnvironmentFailure, UsageError
from toolroll.rollout.types import Action, Environment, Observation, StepResult, Task

OUTCOME = "/tmp/.harbor/outcome.json"
"""The file that `toolroll_harbor` writes."""
_PREPARING = 1800.0
"""Seconds for building and installing, besides the time limits of the agent and the verifier."""


class HarborTrial(SandboxEnvironment):
    """One trial of the task that `env` reads. `back_end` is Harbor's, or `local`: then the agent
    works in the same sandbox in which Harbor runs.
    """

    folder = "/tmp"

    def __init__(self, env: Environment, back_end: str) -> None:
        if not isinstance(env, HarborTask):
            raise UsageError(f"Harbor cannot play {type(env).__name__}: use the environment harbor")
        self._env = env
        self._back_end = back_end
        spec = find_spec("toolroll_harbor")
        assert spec is not None
        self._script = Path(str(spec.origin))

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the sandbox."""
        if self._back_end == "local":
            self._env.check_image(task)
        folders = [Path(str(task.data["folder"])), self._script.parent]
        await self._env.start(task, folders=folders)
        self.sandbox = self._env.sandbox
        limits = (self._env.timeout or 3600.0, self._env.grading_timeout, _PREPARING)
        self.timeout = sum(limits)
        return Observation([{"role": "user", "content": self._env.instruction}])

    def command(self, python: str, agent: str, model: str, timeout: float | None, args: Any) -> str:
        """Return the command that plays the trial with Harbor's `agent`."""
        arguments = {
            "task": str(self._env.task_folder),
            "agent": agent,
            "model": f"{'anthropic' if agent == 'claude-code' else 'openai'}/{model}",
            "environment": self._back_end,
            "timeout": timeout,
            "args": args,
        }
        return shlex.join([python, str(self._script), json.dumps(arguments)])

    async def step(self, action: Action) -> StepResult:
        """Return the reward of Harbor's verifier."""
        content = await self.sandbox.read(OUTCOME)
        if content is None:
            raise EnvironmentFailure("Harbor ended without an outcome")
        outcome = orjson.loads(content)
        if outcome["rewards"] is None:
            raise EnvironmentFailure(
                f"Harbor has no reward: {outcome['exception']}: {outcome['message']}"
            )
        self._env.rewards = read_rewards(orjson.dumps(outcome["rewards"]), "reward.json")
        info = {"harbor_exception": outcome["exception"]} if outcome["exception"] else {}
        return StepResult(reward=the_reward(self._env.rewards), done=True, info=info)

    def metrics(self) -> dict[str, float]:
        """Return the rewards by name."""
        return self._env.rewards
