"""Makes every toolroll environment available as an environment of verifiers (v1, 0.4.0), and so of
prime-rl.

    config = vf.resolve_env_config({"taskset": {"id": "toolroll-verifiers", "env": "desk"}})
    env = vf.load_environment(config)

verifiers finds a taskset by the name of a top-level module, so this package is not part of the
package `toolroll`. It exports the taskset (the tasks and their reward), the harness that plays
them, and an environment whose agent runs in this process.

- The harness executes the environment in this process. Each turn of the model is one chat
  completion request to verifiers' interception server.
- A `TrainClientConfig` is refused unless `toolroll.trainers.verifiers.register` has made an
  `EndpointClient` for it. verifiers' own client would encode the conversation again, and so train
  on other tokens than the model sampled.
- `rewards["environment"]` is the environment's reward. `trace.info["toolroll"]` has the step
  rewards, the stop reason and the seed.
- An aborted episode is a failed rollout with a `HarnessError` and no reward.
- `max_turns` and the agent's token limits end an episode as truncated. Its reward is the
  environment's `truncated_reward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from toolroll.rollout.environment import EnvironmentFactory, EnvironmentOptions, Task
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.registry import agent_maker, load_environment, user_maker
from toolroll.rollout.runs.runner import episode_seed
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import Status, StopReason
from toolroll.trainers.episodes import why_aborted
from toolroll.trainers.verifiers import is_registered

__all__ = ["ToolrollEnv", "ToolrollHarness", "ToolrollTaskset"]

_STOP_CONDITIONS = {StopReason.MAX_TURNS: "max_turns", StopReason.CONTEXT_FULL: "max_total_tokens"}
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
        if not config.env:
            raise UsageError(
                "no environment is named: set the taskset's env, such as desk or "
                "path/to/file.py:NAME"
            )
        factory = load_environment(config.env, config.env_args)
        split = config.split or factory.splits[0]
        for task in factory.tasks(split):
            # A label: the environment writes the first messages when an episode starts.
            prompt = task.data.get("prompt")
            data = ToolrollData(  # pyright: ignore[reportCallIssue] (its other fields have defaults)
                prompt=prompt if isinstance(prompt, str) and prompt else task.id,
                name=task.id,
                env=config.env,
                split=split,
                index=task.index,
                env_args=config.env_args,
                seed=config.seed,
            )
            yield ToolrollTask(data, config.task)


class ToolrollHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """The options `--env.agent.harness.*`. They mean the same as in `EpisodeSettings`."""

    max_turns: int = Field(30, ge=1)
    on_invalid_call: Literal["feedback", "respond", "stop"] = "feedback"
    parallel_calls: Literal["all", "first", "refuse"] | None = None
    step_timeout: float | None = Field(None, gt=0)
    user: str | None = None
    user_settings: dict[str, Any] = Field(default_factory=dict)


_AGENT_SETTINGS = {"on_invalid_call", "parallel_calls", "step_timeout"}
_THREADS = 64


class ToolrollHarness(vf.Harness[ToolrollHarnessConfig]):  # type: ignore[misc]
    """Plays the environment's episode in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    def __init__(self, config: ToolrollHarnessConfig) -> None:
        super().__init__(config)
        self._threads = Threads(_THREADS)
        self._loaded: dict[str, tuple[EnvironmentFactory, Sequence[Task]]] = {}

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
        aborted, or if verifiers' own client would make its tokens.
        """
        if isinstance(ctx.client, vf.TrainClientConfig) and not is_registered(ctx.client):
            raise vf.HarnessError(
                "verifiers' own client encodes conversations again, so its tokens are not exact: "
                "pass the config to toolroll.trainers.verifiers.register"
            )
        server = {"endpoint": endpoint, "api_key": secret, "model": ctx.model}
        # Each sample of a task has a different seed.
        seed = episode_seed(data.seed, f"{data.name}/{trace.id}", 0)
        result = await self._play(data, server, seed, trace.id)
        trace.info["toolroll"] = {
            "reward": result.reward,
            "step_rewards": list(result.step_rewards),
            "stop_reason": result.stop_reason.value,
            "seed": seed,
            "metrics": dict(result.metrics),
        }
        if result.status is Status.ABORTED:
            raise vf.HarnessError(f"the episode was aborted: {why_aborted(result)}")
        if result.stop_reason in _STOP_CONDITIONS:
            trace.stop(_STOP_CONDITIONS[result.stop_reason])
        return vf.ProgramResult(0, "", "")

    async def _play(
        self, data: ToolrollData, server: Mapping[str, str], seed: int, session: str
    ) -> InteractionResult:
        """Play the task in `data` with the model behind `server`. Each turn is a chat completion
        request, and verifiers builds the trace from these requests.
        """
        config = self.config
        key = data.model_dump_json(include={"env", "split", "env_args"})
        if key not in self._loaded:
            factory = load_environment(data.env, data.env_args)
            self._loaded[key] = factory, factory.tasks(data.split)
        factory, tasks = self._loaded[key]
        async with AsyncExitStack() as stack:
            settings = {**server, **config.model_dump(include=_AGENT_SETTINGS)}
            agent = agent_maker("baseline")(self._threads, settings)
            await stack.enter_async_context(aclosing(agent))
            options = EnvironmentOptions()
            if config.user is not None:
                users = user_maker(config.user)(**config.user_settings)
                options = EnvironmentOptions(user=(await stack.enter_async_context(users)).make)
            result: InteractionResult = await agent.asolve(
                factory.make(options),
                None,
                {},
                data.index,
                config.max_turns,
                task=tasks[data.index],
                seed=seed,
                session_id=session,
            )
            return result


class ToolrollEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The config of `ToolrollEnv`. Its one agent runs in this process, because a toolroll
    environment needs no sandbox.
    """

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class ToolrollEnv(vf.Env[ToolrollEnvConfig]):  # type: ignore[misc]
    """The environment that comes with the toolroll taskset."""

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)
