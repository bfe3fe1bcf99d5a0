"""`EpisodeAgent`: the `asolve` of agents that have no hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic

from toolroll.agents.loop.adapt import as_environment
from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.loop.environment_runner import EnvironmentRunner, chosen_task
from toolroll.agents.loop.episode_tracker import EpisodeTracker
from toolroll.agents.loop.play import C, Played, Rules, play, to_its_end
from toolroll.rollout.environment import Environment, Observation, Task
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.runtime.threads import BlockingRunner


class EpisodeAgent(ABC, Generic[C]):
    """An agent that can play any number of episodes at once. `step_timeout`: the time limit for one
    call to the environment, in seconds. `max_observation_bytes`: the maximum size of the text that
    one call returns, in bytes.
    """

    policy: CallPolicy
    step_timeout: float | None
    max_observation_bytes: int

    async def asolve(
        self,
        env: Any,
        rollout_args: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        task_index: int | None = None,
        max_num_steps: int = 30,
        *,
        task: Task | None = None,
        seed: int = 0,
        session_id: str | None = None,
    ) -> InteractionResult:
        """Play one episode of `env`, with at most `max_num_steps` model turns, and return its
        result. `task_index` chooses the task if no `task` is given. Without both, the environment
        draws it. `rollout_args` has no effect.

        Raise `UsageError`, `EngineUnreachableError` and `CancelledError`. Every other failure
        becomes the result's status, stop reason and `info["error"]`.
        """
        task = task or chosen_task(task_index)
        environment = self.prepare(as_environment(env))
        runner = EnvironmentRunner(
            environment,
            task,
            seed,
            self.blocking_runner.run_in_thread,
            self.step_timeout,
            max_observation_bytes=self.max_observation_bytes,
        )
        name = session_id or task.id
        conversation: C | None = None

        async def begin(tracker: EpisodeTracker) -> C:
            nonlocal conversation
            first = await runner.reset()
            tracker.info.update(first.info)
            conversation = await self.converse(environment, first, name, max_num_steps)
            return conversation

        rules = self.rules(environment, sampling_params or {}, max_num_steps)
        try:
            return self.result(await play(runner, begin, rules, session_id=name))
        finally:
            if conversation is not None:
                await to_its_end(self.close(conversation))

    @property
    @abstractmethod
    def blocking_runner(self) -> BlockingRunner:
        """What runs blocking environments."""

    def rules(
        self, environment: Environment, sampling_params: Mapping[str, Any], max_num_steps: int
    ) -> Rules:
        """Return the rules of an episode of `environment`."""
        return Rules(self.policy.under(environment), sampling_params, max_num_steps)

    @abstractmethod
    async def converse(
        self, environment: Environment, first: Observation, name: str, max_num_steps: int
    ) -> C:
        """Return the conversation of the episode `name`, which begins with `first`."""

    @abstractmethod
    def result(self, played: Played[C]) -> InteractionResult:
        """Return the result of a finished episode."""

    def prepare(self, environment: Environment) -> Environment:
        """Return the environment to play. Raise `UsageError` if the agent cannot play it."""
        return environment

    async def close(self, conversation: C) -> None:
        """End `conversation`, which has a result unless the episode was cancelled."""
