"""`RayRunner`: distributes the episodes of a run over processes, on this machine or on a cluster.

Each process is a `RayWorker` with its own engine client, template and environments, and plays its
share of the concurrent episodes. It returns episodes as lines of the episode file, which only the
caller's process writes. The invariants of `worker_pool` and `ray_worker` hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial

from toolroll.evaluation.ray_worker import RayWorker, connected, import_ray
from toolroll.evaluation.worker_pool import play_on_workers, split_concurrency
from toolroll.rollout.environment import Task
from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.episode_file import from_line, to_line
from toolroll.rollout.runs.runner import EpisodeKey, Runner, remaining

Open = Callable[[int, AsyncExitStack], Awaitable[tuple[Runner, Sequence[Task]]]]
"""A function that each process calls with the number of its concurrent episodes and an exit stack.
It returns the runner and the tasks. It is pickled, so it must be a module-level function, or a
`functools.partial` of one.
"""


class RayRunner:
    """Plays a run in `processes` processes of the Ray cluster at `address`, with `concurrency`
    concurrent episodes in total. `local` starts a cluster on this machine for this run.

    Raise `UsageError` if Ray is not installed.
    """

    def __init__(
        self,
        open_: Open,
        *,
        processes: int,
        concurrency: int,
        samples: int,
        address: str = "local",
    ) -> None:
        import_ray()
        self._open = open_
        self._shares = split_concurrency(concurrency, processes)
        self._samples = samples
        self._address = address

    async def run(
        self,
        tasks: Sequence[Task],
        on_episode: Callable[[Episode], None],
        *,
        done: Collection[EpisodeKey] = frozenset(),
    ) -> None:
        """Play every (task, sample) that is not in `done`, as `Runner.run` does.

        Raise `RolloutError` if processes keep dying, and `UsageError` if the cluster cannot be
        reached.
        """
        todo = remaining(tasks, self._samples, done)
        if not todo:
            return
        shares = self._shares[: len(todo)]
        async with connected(self._address, len(shares)):
            workers = [RayWorker(partial(_open_player, self._open, share)) for share in shares]
            plays = [partial(_play, worker) for worker in workers]
            try:
                await play_on_workers(todo, zip(plays, shares, strict=True), on_episode)
            finally:
                await asyncio.gather(*(worker.close() for worker in workers))


async def _play(worker: RayWorker, key: EpisodeKey) -> Episode:
    return from_line(await worker.call("play", *key))


class _LinePlayer:
    """The object of each process."""

    def __init__(self, runner: Runner, tasks: Sequence[Task]) -> None:
        self._runner = runner
        self._tasks = {task.id: task for task in tasks}

    async def play(self, task_id: str, sample: int) -> bytes:
        """Play one episode and return it as a line of the episode file."""
        return to_line(await self._runner.play(self._tasks[task_id], sample))


async def _open_player(open_: Open, share: int, stack: AsyncExitStack) -> _LinePlayer:
    return _LinePlayer(*await open_(share, stack))
