"""Makes every toolroll environment available as an environment of verifiers (v1, 0.4.0), and so of
prime-rl.

    config = vf.resolve_env_config({"taskset": {"id": "toolroll-verifiers", "env": "desk"}})
    env = vf.load_environment(config)

verifiers finds a taskset by the name of a top-level module, so this package is not part of the
package `toolroll`. It exports the taskset (the tasks and their reward), the harness that plays
them, and an environment whose agent runs in this process.

- The harness executes the environment in this process. Each turn of the model is one chat
  completion request to verifiers' interception server, so any verifiers client works.
- `rewards["environment"]` is the environment's reward. `trace.info["toolroll"]` has the step
  rewards, the stop reason and the seed.
- An aborted episode is a failed rollout with a `HarnessError` and no reward.
- `max_turns` and the agent's token limits end an episode as truncated. Its reward is the
  environment's `truncated_reward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from toolroll.rollout.adapters.episodes import EpisodeSettings, why_aborted
from toolroll.rollout.adapters.verifiers.environment import EnvironmentPlayer, record
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Status, StopReason

__all__ = ["ToolrollEnv", "ToolrollHarness", "ToolrollTaskset"]

_LIMITS = {StopReason.MAX_STEPS: "max_turns", StopReason.CONTEXT_FULL: "max_total_tokens"}
"""Maps toolroll's stop reasons to verifiers' stop conditions for truncated traces."""


class ToolrollData(vf.TaskData):  # type: ignore[misc]
    """One task. It names the environment, so that a worker needs nothing else to play the task."""

    env: str
    split: str
    index: int
    env_args: dict[str, Any]
    seed: int


class ToolrollConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The options `--env.taskset.*`. `seed` is the seed of environments and users."""

    env: str = ""
    """A name that `toolroll envs` lists, `path/to/file.py:NAME` or `package.module:NAME`."""
    split: str | None = None
    """The split of the tasks. Default: the environment's first split."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    seed: int = 0


class ToolrollTask(vf.Task[ToolrollData]):  # type: ignore[misc]
    """A task whose reward is the environment's reward."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def environment(self, trace: Any) -> float:
        """Return the environment's reward."""
        return float(trace.info["toolroll"]["reward"])

    @vf.metric  # type: ignore[untyped-decorator]
    async def episode(self, trace: Any) -> dict[str, float]:
        """Return the episode's metrics."""
        return dict(trace.info["toolroll"]["metrics"])


class ToolrollTaskset(vf.Taskset[ToolrollTask, ToolrollConfig]):  # type: ignore[misc]
    """The tasks of one environment. Raise `UsageError` if the config has a `system_prompt`."""

    def __init__(self, config: ToolrollConfig) -> None:
        super().__init__(config)
        if self.system_prompt is not None:
            raise UsageError(
                "system_prompt cannot be set: a toolroll environment has its own system message"
            )

    def load(self) -> Iterator[ToolrollTask]:
        """Yield one verifiers task per task of the environment. Raise `UsageError` if the
        environment or the split does not exist.
        """
        config = self.config
        own = {"env": config.env, "env_args": config.env_args, "seed": config.seed}
        player = EnvironmentPlayer(EpisodeSettings(split=config.split, **own))
        for row in player.rows():
            yield ToolrollTask(ToolrollData(split=player.split, **own, **row), config.task)


class ToolrollHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """The options `--env.agent.harness.*`. They mean the same as in `EpisodeSettings`."""

    max_turns: int = Field(30, ge=1)
    on_invalid_call: Literal["feedback", "respond", "stop"] = "feedback"
    parallel_calls: Literal["all", "first", "refuse"] | None = None
    step_timeout: float | None = Field(None, gt=0)
    user: str | None = None
    user_settings: dict[str, Any] = Field(default_factory=dict)


_NAMES = ("max_turns", "on_invalid_call", "parallel_calls", "step_timeout", "user", "user_settings")


class ToolrollHarness(vf.Harness[ToolrollHarnessConfig]):  # type: ignore[misc]
    """Plays the environment's episode in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    def __init__(self, config: ToolrollHarnessConfig) -> None:
        super().__init__(config)
        self._players: dict[str, EnvironmentPlayer] = {}

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Play the task in `data`, a `ToolrollData`. Raise `HarnessError` if the episode was
        aborted.
        """
        result, seed = await self._player(data).play(
            data.index, base_url=endpoint, api_key=secret, model=ctx.model, session=trace.id
        )
        trace.info["toolroll"] = record(result, seed)
        if result.status is Status.ABORTED:
            raise vf.HarnessError(f"the episode was aborted: {why_aborted(result)}")
        if result.stop_reason in _LIMITS:
            trace.stop(_LIMITS[result.stop_reason])
        return vf.ProgramResult(0, "", "")

    def _player(self, data: ToolrollData) -> EnvironmentPlayer:
        settings = EpisodeSettings(
            env=data.env,
            split=data.split,
            env_args=data.env_args,
            seed=data.seed,
            **{name: getattr(self.config, name) for name in _NAMES},
        )
        key = settings.model_dump_json()
        if key not in self._players:
            self._players[key] = EnvironmentPlayer(settings)
        return self._players[key]


class ToolrollEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The config of `ToolrollEnv`. Its one agent runs in this process, because a toolroll
    environment needs no sandbox.
    """

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class ToolrollEnv(vf.Env[ToolrollEnvConfig]):  # type: ignore[misc]
    """The environment that comes with the toolroll taskset."""

    async def run(self, task: Any, agents: Any) -> None:
        """Play the task once."""
        await agents.agent.run(task)
