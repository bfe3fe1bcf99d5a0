"""`play`: the process that plays the groups of episodes for `AsyncGRPOTrainer`.

Invariants:

- Groups are handed over whole, and in the order in which they began. So no group is overtaken while
  the trainer's version advances, and the trainer's newest group says what was trained before it.
- The rows that are queued, and those of the groups in flight, are at most `Job.most_rows`, except
  that one group is always in flight.
- The process ends when the trainer says so or has died: the same connection tells both.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import EngineError, RolloutError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runtime.threads import LoopThreads, end_within
from toolroll.rollout.types import Status
from toolroll.trainers.episodes import EpisodePlayer, EpisodeSettings, gather, why_aborted
from toolroll.trainers.trl.rows import Row, group_rows

_TICK = 0.2
"""Seconds between two looks at the queue."""
_MOST_EMPTY = 4
"""After so many groups in a row without a row, the process fails."""
_END_WITHIN = 10.0


@dataclass(frozen=True)
class Job:
    """What the process plays. `prompts` are the tasks' indices and metadata. `most_rows` limits the
    rows that are queued or in flight.
    """

    settings: EpisodeSettings
    engine: str
    model: str
    prompts: Sequence[tuple[int, Mapping[str, Any]]]
    params: Mapping[str, Any]
    num_generations: int
    max_staleness: int
    most_rows: int


@dataclass(frozen=True)
class Channels:
    """What the process shares with the trainer's: queues of rows and of metrics, the trainer's
    version, the time of the last progress, and a connection. The process sends its error on it.
    """

    rows: Any
    metrics: Any
    version: Any
    progress: Any
    trainer: Any


def play(job: Job, first_group: int, channels: Channels) -> None:
    """Play groups until the trainer stops this process. `first_group` is the first group's id."""
    for queue in (channels.rows, channels.metrics):
        queue.cancel_join_thread()  # at the end, nobody may read them
    try:
        asyncio.run(_play(job, first_group, channels))
    except KeyboardInterrupt:
        pass  # the trainer gets it too
    except Exception as error:
        with suppress(OSError):  # the trainer has died
            channels.trainer.send(f"{type(error).__name__}: {error}")
        raise
    finally:
        end_within(_END_WITHIN, 1)


async def _play(job: Job, first_group: int, channels: Channels) -> None:
    loop, trainer = asyncio.get_running_loop(), channels.trainer.fileno()
    loop.set_default_executor(LoopThreads())
    model = Model.from_args(job.settings.rollout_args(engine=job.engine, model=job.model))
    player = EpisodePlayer(model, job.settings)
    task = asyncio.create_task(Groups(job, player, channels).run(first_group))

    def told() -> None:
        loop.remove_reader(trainer)
        task.cancel()

    loop.add_reader(trainer, told)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
        await asyncio.wait([task])
        await player.aclose()
    if not task.cancelled():
        task.result()


class Groups:
    """Plays groups with `player`, and hands them over."""

    def __init__(self, job: Job, player: EpisodePlayer, channels: Channels) -> None:
        self._job = job
        self._player = player
        self._channels = channels
        self._limit = asyncio.Semaphore(job.settings.concurrency)
        self._flying: deque[asyncio.Task[list[InteractionResult]]] = deque()
        self._rows_per_group = float(job.num_generations)
        self._empty = 0
        self._sampled = player.model.sampled

    async def run(self, group_id: int) -> None:
        """Play the group `group_id` and those after it, until cancelled.

        Raise `EngineError` if the engine is down, and `RolloutError` if several groups in a row
        have no row.
        """
        handed = group_id
        try:
            while True:
                while self._has_room():
                    self._flying.append(asyncio.create_task(self._group(group_id)))
                    group_id += 1
                if self._flying:
                    await asyncio.wait([self._flying[0]], timeout=_TICK)
                else:
                    await asyncio.sleep(_TICK)
                self._note_progress()
                while self._flying and self._flying[0].done():
                    await self._hand_over(self._flying.popleft().result(), handed)
                    handed += 1
        finally:
            for task in self._flying:
                task.cancel()
            await asyncio.gather(*self._flying, return_exceptions=True)

    def _has_room(self) -> bool:
        queued = self._channels.rows.qsize()
        rows = queued + (len(self._flying) + 1) * self._rows_per_group
        return rows <= self._job.most_rows or not (queued or self._flying)

    def _note_progress(self) -> None:
        """A sampled turn is progress, and so is waiting for the trainer."""
        sampled = self._player.model.sampled
        if sampled != self._sampled or not self._flying:
            self._sampled = sampled
            self._channels.progress.value = time.time()

    async def _group(self, group_id: int) -> list[InteractionResult]:
        job = self._job
        passes, position = divmod(group_id, len(job.prompts))
        index, metadata = job.prompts[position]

        async def episode(number: int) -> InteractionResult:
            async with self._limit:
                return await self._player.play(index, job.params, metadata=metadata, number=number)

        first = passes * job.num_generations
        return await gather(map(episode, range(first, first + job.num_generations)))

    async def _hand_over(self, results: list[InteractionResult], group_id: int) -> None:
        rows = group_rows(results, group_id)
        aborted = [result for result in results if result.status is Status.ABORTED]
        if aborted and (health := await self._player.model.engine.health()).down:
            raise EngineError(f"the engine at {self._player.model.url}: {health.why}")
        self._empty = 0 if rows else self._empty + 1
        if self._empty == _MOST_EMPTY:
            why = why_aborted(aborted[-1]) if aborted else "nothing was sampled"
            raise RolloutError(f"{_MOST_EMPTY} groups in a row have nothing to train on: {why}")
        if rows:
            self._rows_per_group += (len(rows) - self._rows_per_group) / 8
        oldest = self._channels.version.value - self._job.max_staleness
        handed = rows if all(row.model_version >= oldest for row in rows) else []
        for row in handed:
            row.enqueued_at = time.time()
            self._channels.rows.put_nowait(row)
        self._channels.metrics.put_nowait(_metrics(results, rows, handed))


def _metrics(
    results: Sequence[InteractionResult], rows: Sequence[Row], handed: Sequence[Row]
) -> dict[str, float | tuple[float, float]]:
    """Return a group's metrics for TRL, which adds up pairs (sum, count) and names with "total".
    TRL's own means over rows would count a forked episode several times.
    """
    rewards = [result.reward for result in results if result.reward is not None]
    episodes = float(len(results))
    metrics: dict[str, float | tuple[float, float]] = {
        "toolroll/aborted_share": (episodes - len(rewards), episodes),
        "toolroll/turns": (sum(result.metrics.get("turns", 0.0) for result in results), episodes),
        "toolroll/rows_per_episode": (float(len(rows)), episodes),
        "toolroll/handed_over_rows_total": float(len(handed)),
        "toolroll/handed_over_tokens_total": float(
            sum(row.completion_mask.sum() for row in handed)
        ),
        "toolroll/dropped_rows_total": float(len(rows) - len(handed)),
    }
    if rewards:
        metrics["reward"] = (sum(rewards), float(len(rewards)))
        metrics["reward_std"] = (float(np.std(rewards)), 1.0)
    return metrics
