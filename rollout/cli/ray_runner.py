"""`RayRunner`: the episodes of a run spread over a Ray cluster.

Each worker is an actor with an engine client, a template and environments of its own, and plays its share of the concurrency; episodes
come back as lines of the episode file, which the driver alone writes. Invariants: an episode is lost with its worker, played again by
another, and taken in once; workers come back on what is left of the cluster; a cancelled run cancels what is running, and with it
the requests at the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from toolroll.rollout.cli.plan import prepare, run_settings
from toolroll.rollout.cli.settings import RunConfig
from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.runner import EpisodeKey, Runner
from toolroll.rollout.store import from_line, to_line
from toolroll.rollout.types import Episode, Task

logger = logging.getLogger(__name__)

ATTEMPTS = 10
"""How many workers may die under one episode before the run is given up."""
_GRACE, _TURNS_OF_GRACE = 5.0, 50
_PAUSE = 0.5  # seconds before an episode whose worker is gone is given to one again


class Worker:
    """What an actor is. `settings`: a `RunConfig` as plain data."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._config = RunConfig.model_validate(settings)
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._runner: Runner | None = None
        self._tasks: dict[str, Task] = {}
        self._playing = 0

    async def play(self, task_id: str, sample: int) -> bytes:
        """One episode, as a line of the episode file."""
        runner = await self._open()
        self._playing += 1
        try:
            return to_line(await runner.play(self._tasks[task_id], sample))
        finally:
            self._playing -= 1

    async def close(self) -> None:
        """Close the connections, once the episodes that are being cancelled have told the engine."""
        for _ in range(_TURNS_OF_GRACE):
            if not self._playing:
                break
            await asyncio.sleep(_GRACE / _TURNS_OF_GRACE)
        await self._stack.aclose()

    async def _open(self) -> Runner:
        async with self._opening:
            if self._runner is None:
                plan = await prepare(self._config, self._stack)
                self._tasks = {task.id: task for task in plan.tasks}
                self._runner = Runner(plan.factory, plan.make_agent, run_settings(self._config), plan.options)
            return self._runner


class RayRunner:
    """Plays a run on the cluster at `config.ray` (`local`: one on this machine) with `config.ray_workers` workers. Raises `UsageError`
    where ray is not installed or no cluster is there."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._ray = _import_ray()
        self._share = max(1, config.concurrency // config.ray_workers)

    async def run(
        self, tasks: Sequence[Task], on_episode: Callable[[Episode], None], *, done: Collection[EpisodeKey] = frozenset()
    ) -> None:
        """As `Runner.run`; raises `RolloutError` where workers keep dying."""
        todo = [(task.id, sample) for sample in range(self._config.samples) for task in tasks if (task.id, sample) not in done]
        if not todo:
            return
        self._connect()
        settings = self._config.model_dump(mode="json") | {"concurrency": self._share, "ray": None, "out": None}
        actor = self._ray.remote(Worker).options(
            max_concurrency=self._share, max_restarts=-1, num_cpus=0.01, scheduling_strategy="SPREAD"
        )
        workers = [actor.remote(settings) for _ in range(min(self._config.ray_workers, len(todo)))]
        rest = iter(todo)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    for _ in range(self._share):
                        group.create_task(self._work(worker, rest, on_episode))
        finally:
            await self._end(workers)

    async def _end(self, workers: Sequence[Any]) -> None:
        closing = [asyncio.ensure_future(worker.close.remote()) for worker in workers]
        await asyncio.wait(closing, timeout=2 * _GRACE)
        for one in closing:
            one.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        for worker in workers:
            self._ray.kill(worker)

    async def _work(self, worker: Any, todo: Iterator[EpisodeKey], on_episode: Callable[[Episode], None]) -> None:
        for task_id, sample in todo:
            on_episode(from_line(await self._play(worker, task_id, sample)))

    async def _play(self, worker: Any, task_id: str, sample: int) -> bytes:
        for attempt in range(1, ATTEMPTS + 1):
            reference = worker.play.remote(task_id, sample)
            try:
                line: bytes = await reference
                return line
            except asyncio.CancelledError:
                self._ray.cancel(reference)
                raise
            except self._ray.exceptions.RayActorError as error:
                logger.warning("the worker of %s, sample %d is gone (attempt %d): %s", task_id, sample, attempt, type(error).__name__)
            except self._ray.exceptions.RayTaskError as error:
                raise _cause(error) from error
            await asyncio.sleep(_PAUSE * attempt)
        raise RolloutError(f"{ATTEMPTS} workers have died under task {task_id}, sample {sample}: is there memory enough on the nodes?")

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        address = None if self._config.ray == "local" else self._config.ray
        try:
            self._ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
        except (ConnectionError, ValueError) as error:
            raise UsageError(f"--ray {self._config.ray}: there is no Ray cluster: {error}") from error


def _cause(error: Any) -> Exception:
    """What was raised in the worker, as far as it is one of ours."""
    cause = error.cause
    return cause if isinstance(cause, UsageError | RolloutError) else RolloutError(f"a worker failed: {cause!r}")


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        raise UsageError('--ray needs Ray: pip install "toolroll[ray]"') from error
    return ray
