"""`Player`: plays slime's samples. One per event loop and settings, with its model, environments
and user simulators.

Invariants: no turn starts after the rollout was stopped (slime aborts the engines until they are
idle); a failed episode is retried a limited number of times, and is then reported as aborted; the
given samples are not changed.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from toolroll.rollout.adapters.slime.samples import to_samples
from toolroll.rollout.adapters.slime.settings import (
    SlimeSettings,
    agent_settings,
    attribute,
    clean_sampling_params,
    concurrency,
    rollout_args,
)
from toolroll.rollout.engine import Engine, EngineConfig, Progress
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.registry import agent_maker, load_environment, user_maker
from toolroll.rollout.runs.runner import episode_seed
from toolroll.rollout.template import ChatTemplate, certify
from toolroll.rollout.types import (
    Agent,
    Completion,
    EnvironmentFactory,
    EnvironmentOptions,
    GenerateRequest,
    InteractionResult,
    Status,
    StopReason,
    Task,
)

logger = logging.getLogger(__name__)


class StoppableEngine(Engine):
    """An `Engine` that sends no request once `stopped()` is True. Each further turn, or part of a
    resumed one, is an abort without tokens.
    """

    def __init__(self, config: EngineConfig, stopped: Callable[[], bool]) -> None:
        super().__init__(config)
        self._stopped = stopped

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Return one turn, or an abort without tokens if the rollout was stopped."""
        if self._stopped():
            empty = np.zeros(0, dtype=np.float32) if request.return_logprob else None
            return Completion(np.zeros(0, dtype=np.int32), empty, "abort")
        return await super().generate(request, progress=progress)


def certified(template: ChatTemplate) -> None:
    """Log warnings about training with this template. Raise `UsageError` if its tokens would be
    wrong.
    """
    report = certify(template)
    wrong = [probe.what for probe in report.probes if probe.outcome == "wrong"]
    if wrong:
        raise UsageError(
            f"this chat template cannot be used for training, its tokens would be wrong "
            f"({'; '.join(wrong)}): please report it"
        )
    if not report.exact:
        for line in report.remarks():
            logger.warning("chat template: %s", line)


class Player:
    """Plays samples with `settings` on the model that `args` names. `stopped` is called before each
    turn; once it returns True, no further turn is started.
    """

    def __init__(
        self, args: Any, settings: SlimeSettings, *, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self.settings = settings
        self.stopped = stopped
        self.limit = asyncio.Semaphore(concurrency(args, settings))
        self.served = Model.from_args(
            rollout_args(args, settings),
            engine=lambda config: StoppableEngine(config, lambda: self.stopped()),
        )
        self._make_agent = agent_maker(settings.agent)
        self._seed = (
            settings.seed if settings.seed is not None else int(attribute(args, "rollout_seed", 0))
        )
        self._reward_key: str | None = attribute(args, "reward_key")
        self._tasks: dict[tuple[str, str], tuple[EnvironmentFactory, Sequence[Task]]] = {}
        self._stack = AsyncExitStack()
        self._options: EnvironmentOptions | None = None
        self._opening = asyncio.Lock()

    async def play(self, sample: Any, sampling_params: Mapping[str, Any]) -> list[Any]:
        """Play the sample's episode. Return one sample, or one for each sequence if the episode
        forked.
        """
        await self._open()
        factory, task = await self._find(sample)
        session = sample.session_id or uuid.uuid4().hex
        params = clean_sampling_params(sampling_params)
        result = await self._episode(factory, task, params, sample.index or 0, session)
        for _ in range(self.settings.retries):
            if (
                result.status is not Status.ABORTED
                or result.stop_reason is StopReason.ENGINE_ABORT
                or self.stopped()
            ):
                break
            result = await self._episode(factory, task, params, sample.index or 0, session)
        filler = next(iter(self.served.template.stop_token_ids), 0)
        samples = to_samples(sample, result, filler=filler, reward_key=self._reward_key)
        for made in samples:
            made.session_id = session
        return samples

    async def _episode(
        self,
        factory: EnvironmentFactory,
        task: Task,
        params: Mapping[str, Any],
        number: int,
        session: str,
    ) -> InteractionResult:
        assert self._options is not None
        agent: Agent = self._make_agent(self.served, agent_settings(self.settings))
        return await agent.asolve(
            factory.make(self._options),
            None,
            params,
            task.index,
            self.settings.max_turns,
            task=task,
            seed=episode_seed(self._seed, task.id, number),
            session_id=session,
        )

    async def _open(self) -> None:
        """Check the engine's model and the chat template, and open the user simulators, once."""
        async with self._opening:
            if self._options is not None:
                return
            for line in await self.served.check_identity(
                allow_mismatch=self.settings.allow_model_mismatch
            ):
                logger.warning("%s", line)
            await self.served.run_in_thread(certified, self.served.template)
            make = None
            if self.settings.user is not None:
                users = user_maker(self.settings.user)(**self.settings.user_settings)
                await self._stack.enter_async_context(users)
                make = users.make
            elif self.settings.user_settings:
                raise UsageError(
                    "toolroll_user_settings is set, but toolroll_user does not say which user "
                    "simulator to use (such as openai)"
                )
            self._options = EnvironmentOptions(user=make)

    async def _find(self, sample: Any) -> tuple[EnvironmentFactory, Task]:
        """Return the environment and the task that the sample names."""
        metadata = sample.metadata or {}
        name = metadata.get("env") or self.settings.env
        if name is None:
            raise UsageError(
                "no environment is named: set toolroll_env, or write the tasks with `toolroll "
                "tasks ENV`, which sets metadata.env"
            )
        split = metadata.get("split") or self.settings.split or ""
        async with self._opening:
            if (name, split) not in self._tasks:
                factory = load_environment(name, self.settings.env_settings)
                # May import a benchmark's package and read its database.
                self._tasks[name, split] = (
                    factory,
                    await self.served.run_in_thread(factory.tasks, split or factory.splits[0]),
                )
        factory, tasks = self._tasks[name, split]
        index = task_index(sample.prompt)
        if not 0 <= index < len(tasks):
            raise UsageError(
                f"{name} ({split or factory.splits[0]}) has tasks 0 to {len(tasks) - 1}; the "
                f"sample's prompt is {index}"
            )
        return factory, tasks[index]

    async def aclose(self) -> None:
        """Close the users and the model."""
        await self._stack.aclose()
        await self.served.aclose()


def task_index(prompt: Any) -> int:
    """Return the task's index: the sample's prompt (`--input-key index`)."""
    if isinstance(prompt, int) and not isinstance(prompt, bool):
        return prompt
    if isinstance(prompt, str) and prompt.strip().isdigit():
        return int(prompt)
    raise UsageError(
        f"a sample's prompt must be the task's index, not {str(prompt)[:60]!r}: write the tasks "
        f"with `toolroll tasks ENV`, and run with --input-key index and without "
        "--apply-chat-template"
    )
