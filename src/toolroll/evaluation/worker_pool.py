"""Distribute episodes over worker processes.

Invariants: if an episode's worker dies, the episode is played again, and stored once. If workers
keep dying, the run ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import RolloutError
from toolroll.rollout.runs.runner import EpisodeKey, play_all

logger = logging.getLogger(__name__)

T = TypeVar("T")
Play = Callable[[EpisodeKey], Awaitable[Episode]]

ATTEMPTS = 10
"""Give up after this many workers have died while playing the same episode."""
_PAUSE = 0.5  # seconds before an episode whose worker died is played again


class WorkerDiedError(RolloutError):
    """Raised if a worker process ended without a result, for example because it was killed or ran
    out of memory. A retry may succeed.
    """


class WorkerStalledError(WorkerDiedError):
    """Raised if a worker process was killed because its event loop did not respond."""


def split_concurrency(concurrency: int, players: int) -> list[int]:
    """Split `concurrency` evenly over at most `players` workers. Return the number of concurrent
    episodes of each worker, which is at least one.
    """
    players = min(players, concurrency)
    return [concurrency // players + (number < concurrency % players) for number in range(players)]


async def play_on_workers(
    todo: Iterable[EpisodeKey],
    players: Iterable[tuple[Play, int]],
    on_episode: Callable[[Episode], None],
) -> None:
    """Play `todo` on `players`: pairs of a function that plays one episode on one worker, and the
    number of concurrent episodes of that worker.

    Raise `RolloutError` if workers keep dying.
    """
    plays = [partial(_play, play) for play, share in players for _ in range(share)]
    await play_all(list(todo), plays, on_episode)


async def _play(play: Play, key: EpisodeKey) -> Episode:
    episode, _ = await play_until_survived(partial(play, key), f"task {key[0]}, sample {key[1]}")
    return episode


async def play_until_survived(play: Callable[[], Awaitable[T]], episode: str) -> tuple[T, int]:
    """Await `play()`, again if its worker dies. Return its result, and how many workers died.
    `episode`: its name in messages.

    Raise `RolloutError` if workers keep dying.
    """
    stalls = 0
    for deaths in range(ATTEMPTS):
        try:
            return await play(), deaths
        except WorkerDiedError as error:
            stalls += isinstance(error, WorkerStalledError)
            logger.warning("the worker of %s died (attempt %d): %s", episode, deaths + 1, error)
        if deaths + 1 < ATTEMPTS:
            await asyncio.sleep(_PAUSE * (deaths + 1))
    why = "is there enough memory, and can a worker import the environment and the agent?"
    if stalls:
        why = (
            f"{stalls} of them had a blocked event loop: the environment or the agent (also of an "
            "episode beside it) must await, or run blocking code in a thread"
        )
    raise RolloutError(f"{ATTEMPTS} workers died while playing {episode}: {why}")
