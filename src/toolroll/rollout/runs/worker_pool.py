"""Distribute episodes over worker processes, on this machine or on a cluster.

Invariants: if an episode's worker dies, the episode is played again, and stored once. If workers
keep dying, the run ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from toolroll.rollout.errors import RolloutError
from toolroll.rollout.runs.runner import EpisodeKey, play_all
from toolroll.rollout.types import Episode

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
    plays = [partial(_play, player) for player, share in players for _ in range(share)]
    await play_all(list(todo), plays, on_episode)


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
