"""`RayRunner`: distributes the episodes of a run over a Ray cluster.

Each worker is a Ray actor with its own engine client, template and environments, and plays its
share of the concurrent episodes. It returns episodes as lines of the episode file, which only the
driver writes. The invariants of `worker_pool` hold. In addition:

- Workers that died are restarted on the remaining nodes.
- If the run is cancelled, the running episodes and their requests at the engine are cancelled too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any

from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.runs.episode_file import from_line, to_line
from toolroll.rollout.runs.run_config import RunConfig
from toolroll.rollout.runs.runner import EpisodeKey, Runner, remaining
from toolroll.rollout.runs.setup import open_runner, worker_settings
from toolroll.rollout.runs.worker_pool import (
    WorkerDiedError,
    play_on_workers,
    split_concurrency,
)
from toolroll.rollout.types import Episode, Task

_GRACE, _TURNS_OF_GRACE = 5.0, 50


class Worker:
    """The class of the Ray actors. `settings`: what `worker_settings` returns."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._runner: Runner | None = None
        self._tasks: dict[str, Task] = {}
        self._playing = 0

    async def play(self, task_id: str, sample: int) -> bytes:
        """Play one episode and return it as a line of the episode file."""
        runner = await self._open()
        self._playing += 1
        try:
            return to_line(await runner.play(self._tasks[task_id], sample))
        finally:
            self._playing -= 1

    async def close(self) -> None:
        """Close the connections as soon as the cancelled episodes have aborted their requests, but
        at the latest after `_GRACE` seconds.
        """
        for _ in range(_TURNS_OF_GRACE):
            if not self._playing:
                break
            await asyncio.sleep(_GRACE / _TURNS_OF_GRACE)
        await self._stack.aclose()

    async def _open(self) -> Runner:
        async with self._opening:
            if self._runner is None:
                self._runner, tasks = await open_runner(self._settings, self._stack)
                self._tasks = {task.id: task for task in tasks}
            return self._runner


class RayRunner:
    """Plays a run with `config.ray_workers` workers on the cluster at `config.ray` (`local`: a
    new cluster on this machine).

    Raise `UsageError` if ray is not installed or the cluster cannot be reached.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._ray = _import_ray()
        self._shares = split_concurrency(config.concurrency, config.ray_workers)

    async def run(
        self,
        tasks: Sequence[Task],
        on_episode: Callable[[Episode], None],
        *,
        done: Collection[EpisodeKey] = frozenset(),
    ) -> None:
        """Play every (task, sample) that is not in `done`, as `Runner.run` does.

        Raise `RolloutError` if workers keep dying.
        """
        todo = remaining(tasks, self._config.samples, done)
        if not todo:
            return
        self.connect()
        players = [_Actor(self._ray, self._config, share) for share in self._shares[: len(todo)]]
        try:
            await play_on_workers(todo, [(player, player.share) for player in players], on_episode)
        finally:
            await self._end([player.worker for player in players])

    async def _end(self, workers: Sequence[Any]) -> None:
        closing = [asyncio.ensure_future(worker.close.remote()) for worker in workers]
        await asyncio.wait(closing, timeout=2 * _GRACE)
        for future in closing:
            future.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        for worker in workers:
            self._ray.kill(worker)

    def connect(self) -> None:
        """Connect this process to the cluster, unless it is already connected to one."""
        if self._ray.is_initialized():
            return
        address = self._config.ray
        try:
            self._ray.init(
                address=address,  # "local" starts a cluster; None would join one that runs here
                log_to_driver=False,
                include_dashboard=False if address == "local" else None,
            )
        except (ConnectionError, ValueError) as error:
            raise UsageError(
                f"--ray {self._config.ray}: cannot connect to a Ray cluster: {error}"
            ) from error


class _Actor:
    """The driver's handle of a worker. Ray restarts the worker if it dies."""

    def __init__(self, ray: Any, config: RunConfig, share: int) -> None:
        self.share = share
        self._ray = ray
        actor = ray.remote(Worker).options(
            max_concurrency=share, max_restarts=-1, num_cpus=0.01, scheduling_strategy="SPREAD"
        )
        self.worker = actor.remote(worker_settings(config, share))

    async def play(self, key: EpisodeKey) -> Episode:
        """Play one episode."""
        reference = self.worker.play.remote(*key)
        try:
            return from_line(await reference)
        except asyncio.CancelledError:
            self._ray.cancel(reference)
            raise
        except self._ray.exceptions.RayActorError as error:
            raise WorkerDiedError(type(error).__name__) from error
        except self._ray.exceptions.RayTaskError as error:
            raise _cause(error) from error


def _cause(error: Any) -> Exception:
    """Return the error that the worker raised. If it is not one of toolroll's errors, wrap it."""
    if isinstance(error.cause, UsageError | RolloutError):
        return error.cause
    return RolloutError(f"a worker failed: {error.cause!r}")


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        raise UsageError('--ray needs Ray: pip install "ray>=2.40"') from error
    return ray
