"""`RayPlayer`: plays samples in several processes of the trainer's Ray cluster.

Each process has a `Player` with its own engine client. All samples of a group are played in the
same process, so a parked episode is continued where it waits.

Invariant: if a process dies, its episodes are played again from the beginning, with the same seeds.
`worker_deaths` in a sample's metrics counts how often, also before the episode was parked.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from toolroll.evaluation.ray_worker import RayWorker
from toolroll.evaluation.worker_pool import WorkerDiedError, play_until_survived
from toolroll.trainers.episodes import task_index
from toolroll.trainers.slime.player import Player, never
from toolroll.trainers.slime.samples import KEY, aborted_metrics, is_parked
from toolroll.trainers.slime.settings import SlimeSettings, option_name

_INTERVAL = 0.1
"""Seconds between two looks at whether a rollout was stopped."""


class RayPlayer:
    """Plays samples as `Player` does, in `settings.workers` processes.

    Its methods have the signatures of `Player`'s, because a rollout is played with either. The
    classes share no code, and a common interface would only repeat the signatures once more.
    """

    def __init__(self, args: Any, settings: SlimeSettings) -> None:
        self.settings = settings
        SlimeSettings.checked(settings, name=option_name)
        self.limit = asyncio.Semaphore(settings.concurrency)
        self._workers = [
            RayWorker(partial(_open_player, args, settings)) for _ in range(settings.workers)
        ]
        self._running: dict[str, tuple[RayWorker, Callable[[], bool]]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def play(
        self,
        sample: Any,
        sampling_params: Mapping[str, Any],
        *,
        stopped: Callable[[], bool] = never,
        park: bool = False,
        mask: bool = False,
    ) -> list[Any]:
        """Play the sample's episode, as `Player.play` does, in the process of its group."""
        worker = self._worker_of(sample)

        async def play() -> list[Any]:
            call = uuid.uuid4().hex  # a process that was only unreachable goes on with the last one
            self._running[call] = worker, stopped
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch())
            try:
                samples: list[Any] = await worker.call(
                    "play", call, sample, sampling_params, stopped=stopped(), park=park, mask=mask
                )
                return samples
            finally:
                del self._running[call]

        samples, deaths = await play_until_survived(play, f"sample {sample.index}")
        earlier = (aborted_metrics(sample) or {}).get("worker_deaths", 0)
        for played in samples:
            played.metadata[KEY]["metrics"]["worker_deaths"] = earlier + deaths
        return samples

    async def close_parked(self, samples: Iterable[Any]) -> None:
        """Close the parked episodes of `samples`, which `play` returned for one group."""
        parked = list(filter(is_parked, samples))
        if parked:
            await _call(self._worker_of(parked[0]), "close_parked", parked)

    async def parked_metrics(self) -> dict[str, float]:
        """Return the number of parked episodes, and of dropped ones by limit."""
        total: Counter[str] = Counter()
        for metrics in await self._call_all("parked_metrics"):
            total.update(metrics)
        return dict(total)

    async def abort(self) -> None:
        """Abort all running requests at the engine."""
        await self._send_stops()
        await self._call_all("abort")

    async def aclose(self) -> None:
        """Close the players and end their processes."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def _worker_of(self, sample: Any) -> RayWorker:
        group = sample.group_index
        return self._workers[
            (task_index(sample.prompt) if group is None else group) % len(self._workers)
        ]

    async def _watch(self) -> None:
        while self._running:
            await self._send_stops()
            await asyncio.sleep(_INTERVAL)

    async def _send_stops(self) -> None:
        """Tell the processes which of their running episodes were stopped."""
        calls: dict[RayWorker, list[str]] = {}
        for call, (worker, stopped) in self._running.items():
            if stopped():
                calls.setdefault(worker, []).append(call)
        await asyncio.gather(*(_call(worker, "stop", calls[worker]) for worker in calls))

    async def _call_all(self, method: str) -> list[Any]:
        """Call `method` in each process. Return the results of those that did not die."""
        results = await asyncio.gather(*(_call(worker, method) for worker in self._workers))
        return [result for result in results if result is not None]


async def _call(worker: RayWorker, method: str, *args: Any) -> Any:
    """Call `method`. Return None if the process died: its parked episodes are gone, and the others
    are played again, with the stops that hold by then.
    """
    try:
        return await worker.call(method, *args)
    except WorkerDiedError:
        return None


class _HeldPlayer:
    """The object of each process."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._stopped: dict[str, bool] = {}
        self.close_parked = player.close_parked
        self.parked_metrics = player.parked_metrics
        self.abort = player.abort

    async def play(
        self,
        call: str,
        sample: Any,
        sampling_params: Mapping[str, Any],
        *,
        stopped: bool,
        park: bool,
        mask: bool,
    ) -> list[Any]:
        """Play the sample's episode, until `stop` gets `call`."""
        self._stopped[call] = stopped
        try:
            return await self._player.play(
                sample,
                sampling_params,
                stopped=lambda: self._stopped.get(call, False),
                park=park,
                mask=mask,
            )
        finally:
            del self._stopped[call]

    async def stop(self, calls: Iterable[str]) -> None:
        """Start no further turn in the episodes of `calls`."""
        for call in self._stopped.keys() & set(calls):
            self._stopped[call] = True


async def _open_player(args: Any, settings: SlimeSettings, stack: AsyncExitStack) -> _HeldPlayer:
    player = Player(args, settings)
    stack.push_async_callback(player.aclose)
    return _HeldPlayer(player)
