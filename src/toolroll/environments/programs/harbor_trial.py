"""`HarborTrial`: a task whose agent and verifier Harbor runs, in an interpreter of its own."""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
from pathlib import Path

import orjson

from toolroll.environments.harbor import HarborTask, folder_of, the_reward
from toolroll.environments.programs.program_settings import ProgramSettings
from toolroll.environments.sandboxed import SandboxEnvironment
from toolroll.rollout.errors import EnvironmentFailure, UsageError
from toolroll.rollout.types import Action, Environment, Observation, StepResult, Task

OUTCOME = "/tmp/.harbor/outcome.json"
"""The file that `toolroll_harbor` writes."""
_PREPARING = 1800.0
"""Seconds for building and installing, besides the time limits of the agent and the verifier."""


class HarborTrial(SandboxEnvironment):
    """One trial of the task that `env` reads. With the back end `local`, Harbor and its agent work
    in the same sandbox. `model` is the model's name.
    """

    folder = "/tmp"

    def __init__(self, env: Environment, back_end: str, model: str) -> None:
        if not isinstance(env, HarborTask):
            raise UsageError(f"Harbor cannot play {type(env).__name__}: use the environment harbor")
        self._env = env
        self._back_end = back_end
        self._model = model
        spec = find_spec("toolroll_harbor")
        assert spec is not None
        self._script = Path(str(spec.origin))

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the sandbox."""
        env = self._env
        if self._back_end == "local":
            env.check_image(task)
        await env.start(task, folders=[folder_of(task), self._script.parent])
        self.sandbox = env.sandbox
        self.timeout = env.timeout
        return Observation([{"role": "user", "content": env.instruction}])

    def program(self, settings: ProgramSettings) -> tuple[str, float]:
        """Return the command that plays the trial with Harbor, which limits its agent itself."""
        provider = "anthropic" if settings.harbor_agent == "claude-code" else "openai"
        arguments = {
            "task": str(self._env.task_folder),
            "agent": settings.harbor_agent,
            "model": f"{provider}/{self._model}",
            "environment": self._back_end,
            "timeout": settings.timeout,
            "args": settings.harbor_args,
            "variables": settings.variables,
        }
        words = [settings.harbor_python, str(self._script), json.dumps(arguments)]
        _, limit = super().program(settings)
        return shlex.join(words), limit + self._env.grading_timeout + _PREPARING

    async def step(self, action: Action) -> StepResult:
        """Return the reward of Harbor's verifier."""
        outcome = orjson.loads(await self.sandbox.read(OUTCOME) or b"null")
        if not outcome or outcome["rewards"] is None:
            raise EnvironmentFailure(f"Harbor ended without a reward: {outcome}")
        self._env.rewards = outcome["rewards"]
        info = {"harbor_exception": outcome["exception"]} if outcome["exception"] else {}
        return StepResult(reward=the_reward(self._env.rewards), done=True, info=info)

    def metrics(self) -> dict[str, float]:
        """Return the rewards by name."""
        return self._env.rewards
