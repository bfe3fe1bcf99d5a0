"""`Runner`: plays (task, sample) pairs of one environment, many at once, in one event loop.

Invariants: one episode's failure never touches another's (I7); a cancelled run leaves no request behind at the engine and records no
unfinished episode; the seed of an episode follows from the run's seed, its task and its sample, not from the order of play.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Agent, EnvironmentFactory, EnvironmentOptions, Episode, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run plays: `samples` of each task, `concurrency` episodes at once, at most `max_num_steps` turns each."""

    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 1
    max_num_steps: int = 30
    concurrency: int = 64
    seed: int = 0
    model: str = ""

    def __post_init__(self) -> None:
        for name in ("samples", "max_num_steps", "concurrency"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")


def episode_seed(seed: int, task_id: str, sample: int) -> int:
    """The seed of one episode, in [0, 2^31)."""
    digest = hashlib.blake2b(f"{seed}/{task_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31


def session_id(env: str, task_id: str, sample: int) -> str:
    """The routing key of one episode."""
    return f"{env}/{task_id}#{sample}"


class Runner:
    """Plays `factory`'s tasks; `make_agent()` gives the agent of one episode."""

    def __init__(
        self,
        factory: EnvironmentFactory,
        make_agent: Callable[[], Agent],
        settings: RunSettings,
        options: EnvironmentOptions | None = None,
    ) -> None:
        self.factory = factory
        self.settings = settings
        self._make_agent = make_agent
        self._options = options or EnvironmentOptions()

    async def run(self, tasks: Sequence[Task], on_episode: Callable[[Episode], None]) -> None:
        """Play every (task, sample); `on_episode` takes each finished episode in, in the order of finishing.

        Raises `UsageError` as soon as one episode shows that the settings cannot work; the others are cancelled.
        """
        todo = ((task, sample) for sample in range(self.settings.samples) for task in tasks)
        count = min(self.settings.concurrency, len(tasks) * self.settings.samples)
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._work(todo, on_episode))

    async def _work(self, todo: Iterator[tuple[Task, int]], on_episode: Callable[[Episode], None]) -> None:
        for task, sample in todo:
            on_episode(await self.play(task, sample))

    async def play(self, task: Task, sample: int) -> Episode:
        """One episode."""
        name, settings = self.factory.name, self.settings
        seed = episode_seed(settings.seed, task.id, sample)
        result = await self._make_agent().asolve(
            self.factory.make(self._options),
            None,
            settings.sampling_params,
            task.index,
            settings.max_num_steps,
            task=task,
            seed=seed,
            session_id=session_id(name, task.id, sample),
        )
        return Episode(name, task.id, task.index, sample, seed, result, settings.model)
