"""Distribute episodes over worker processes, on this machine or on a cluster.

Invariants: if an episode's worker dies, the episode is played again, and stored once. If workers
keep dying, the run ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from toolroll.rollout.errors import RolloutError
from toolroll.rollout.runs.runner import EpisodeKey, check_all_played
from toolroll.rollout.types import Episode, Task

logger = logging.getLogger(__name__)

ATTEMPTS = 10
"""Give up the run after this many workers have died while playing the same episode."""
_PAUSE = 0.5  # seconds before an episode whose worker died is played again


class WorkerDiedError(RolloutError):
    """Raised if a worker process ended without a result, for example because it was killed or ran
    out of memory.
    """


class Worker(Protocol):
    """One process that plays several episodes at the same time."""

    async def play(self, key: EpisodeKey) -> Episode:
        """Play one episode. Raise `WorkerDiedError` if the process dies. A retry may succeed."""
        ...


def remaining(
    tasks: Sequence[Task], samples: int, done: Collection[EpisodeKey]
) -> list[EpisodeKey]:
    """Return the episodes to play, in order: the first sample of all tasks, then the second."""
    return [
        (task.id, sample)
        for sample in range(samples)
        for task in tasks
        if (task.id, sample) not in done
    ]


def split_concurrency(concurrency: int, players: int) -> list[int]:
    """Split `concurrency` evenly over at most `players` workers. Return the number of concurrent
    episodes of each worker, which is at least one.
    """
    players = min(players, concurrency)
    return [concurrency // players + (number < concurrency % players) for number in range(players)]


async def play_on_workers(
    todo: Iterable[EpisodeKey],
    players: Iterable[tuple[Worker, int]],
    on_episode: Callable[[Episode], None],
) -> None:
    """Play `todo` on `players`, which are pairs of a worker and the number of its concurrent
    episodes.

    Raise `RolloutError` if workers keep dying.
    """
    keys = list(todo)
    rest, left = iter(keys), set(keys)

    def take(episode: Episode) -> None:
        on_episode(episode)
        left.discard((episode.task_id, episode.sample))

    async with asyncio.TaskGroup() as group:
        for player, share in players:
            for _ in range(share):
                group.create_task(_work(player, rest, take))
    check_all_played(left)


async def _work(
    player: Worker, todo: Iterator[EpisodeKey], on_episode: Callable[[Episode], None]
) -> None:
    for key in todo:
        on_episode(await _play(player, key))


async def _play(player: Worker, key: EpisodeKey) -> Episode:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await player.play(key)
        except WorkerDiedError as error:
            logger.warning(
                "the worker of %s, sample %d died (attempt %d): %s", *key, attempt, error
            )
        if attempt < ATTEMPTS:
            await asyncio.sleep(_PAUSE * attempt)
    raise RolloutError(
        f"{ATTEMPTS} workers died while playing task {key[0]}, sample {key[1]}: is there enough "
        "memory, and can a worker import the environment and the agent?"
    )
