"""`EnvironmentPlayer`: plays a toolroll environment with the model behind verifiers' interception
server.

Each turn is one chat completion request to this server, and verifiers builds the trace from these
requests. The loop over turns, the policy for invalid calls and the reward are the same as for
toolroll's other agents. The classes that verifiers loads are in `toolroll_verifiers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from toolroll.rollout.adapters.episodes import EpisodeSettings
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.registry import agent_maker, load_environment, user_maker
from toolroll.rollout.runs.runner import episode_seed
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import (
    EnvironmentFactory,
    EnvironmentOptions,
    InteractionResult,
    Task,
)

_THREADS = 64


class EnvironmentPlayer:
    """Plays the tasks of `settings.env`, which is a name or `path/to/file.py:NAME`.

    These fields of `settings` have an effect: env, split, env_args, seed, max_turns,
    on_invalid_call, parallel_calls, step_timeout, user and user_settings. Raise `UsageError` if the
    environment does not exist.
    """

    def __init__(self, settings: EpisodeSettings) -> None:
        if not settings.env:
            raise UsageError(
                "no environment is named: set the taskset's env, such as desk or "
                "path/to/file.py:NAME"
            )
        self.settings = settings
        self._factory: EnvironmentFactory = load_environment(settings.env, settings.env_args)
        self.split = settings.split or self._factory.splits[0]
        self._tasks: Sequence[Task] = self._factory.tasks(self.split)
        self._threads = Threads(_THREADS)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per task: `prompt`, `name` and `index`.

        `prompt` is only a label, because the environment writes the first messages when an episode
        starts. It is the prompt in the task's data if that is a text, otherwise the task's id.
        """
        rows = []
        for task in self._tasks:
            prompt = task.data.get("prompt")
            rows.append(
                {
                    "prompt": prompt if isinstance(prompt, str) and prompt else task.id,
                    "name": task.id,
                    "index": task.index,
                }
            )
        return rows

    async def play(
        self, index: int, *, base_url: str, api_key: str, model: str, session: str
    ) -> tuple[InteractionResult, int]:
        """Play the task `index` with the model at `base_url`. Return the episode and its seed.

        The seed depends on `settings.seed`, the task and `session`, so that each sample of a task
        has a different seed.
        """
        task = self._tasks[index]
        seed = episode_seed(self.settings.seed, f"{task.id}/{session}", 0)
        async with AsyncExitStack() as stack:
            agent = agent_maker("baseline")(
                self._threads,
                {
                    "endpoint": base_url,
                    "api_key": api_key,
                    "model": model,
                    "on_invalid_call": self.settings.on_invalid_call,
                    "parallel_calls": self.settings.parallel_calls,
                    "step_timeout": self.settings.step_timeout,
                },
            )
            await stack.enter_async_context(aclosing(agent))
            make = None
            if self.settings.user is not None:
                users = user_maker(self.settings.user)(**self.settings.user_settings)
                await stack.enter_async_context(users)
                make = users.make
            result: InteractionResult = await agent.asolve(
                self._factory.make(EnvironmentOptions(user=make)),
                None,
                {},
                task.index,
                self.settings.max_turns,
                task=task,
                seed=seed,
                session_id=session,
            )
            return result, seed


def record(result: InteractionResult, seed: int) -> Mapping[str, Any]:
    """Return what the trace stores about an episode, as JSON data."""
    return {
        "reward": result.reward,
        "step_rewards": list(result.step_rewards),
        "stop_reason": result.stop_reason.value,
        "seed": seed,
        "metrics": dict(result.metrics),
    }
