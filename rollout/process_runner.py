"""`ProcessRunner`: the episodes of a run spread over processes of this machine, for where one event loop is not enough.

Each process has an event loop, an engine client, a template and environments of its own; finished episodes come back to the one that
began the run, which alone writes. Invariants: as in `spread`; a process that died is started anew; the processes end with the one
that began them, however it ends, and their requests are aborted at the engine first (SIGKILL of the processes themselves aside).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import signal
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any

from toolroll.rollout.errors import RolloutError, ToolrollError
from toolroll.rollout.garbage import paced_garbage
from toolroll.rollout.runner import EpisodeKey, Runner
from toolroll.rollout.spread import PlayerGoneError, left_over, shares, spread
from toolroll.rollout.store import from_line, to_line
from toolroll.rollout.types import Episode, Task

Open = Callable[[int, AsyncExitStack], Awaitable[tuple[Runner, Sequence[Task]]]]
"""Opens what one process plays with: of the number of its episodes at once, and of a stack that closes it. It is pickled: a function
of a module, or a `functools.partial` of one."""

_GRACE = 10.0
_LIMIT = 1 << 22  # bytes read ahead: an episode is some hundred thousand
_LENGTH = struct.Struct("!Q")
_QUIET = (signal.SIGINT, signal.SIGTERM)


class ProcessRunner:
    """Plays a run in `processes` processes, with `concurrency` episodes at once in all of them together."""

    def __init__(self, open_: Open, *, processes: int, concurrency: int, samples: int) -> None:
        self._open = open_
        self._shares = shares(concurrency, processes)
        self._samples = samples

    async def run(
        self, tasks: Sequence[Task], on_episode: Callable[[Episode], None], *, done: Collection[EpisodeKey] = frozenset()
    ) -> None:
        """As `Runner.run`; raises `RolloutError` where processes keep dying."""
        todo = left_over(tasks, self._samples, done)
        players = [_Process(self._open, share) for share in self._shares[: len(todo)]]
        try:
            await spread(todo, [(player, player.share) for player in players], on_episode)
        finally:
            await asyncio.gather(*(player.close() for player in players))


class _Process:
    """One of the processes, seen from the one that began them. It is started at its first episode."""

    def __init__(self, open_: Open, share: int) -> None:
        self.share = share
        self._open = open_
        self._waiting: dict[EpisodeKey, asyncio.Future[Episode]] = {}
        self._starting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    async def play(self, key: EpisodeKey) -> Episode:
        """One episode."""
        writer = await self._started()
        future: asyncio.Future[Episode] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            _send(writer, key)
            return await future
        finally:
            self._waiting.pop(key, None)

    async def close(self) -> None:
        """End it: it cancels what it plays, and is given a time to tell the engine."""
        if self._writer is not None and self._listening is not None:
            self._writer.close()
            await self._listening

    async def _started(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._writer is None or self._listening is None or self._listening.done():
                ours, theirs = socket.socketpair()
                with theirs:
                    process = _start(self._open, self.share, theirs)
                reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LIMIT)
                self._listening = asyncio.create_task(self._listen(reader, process))
            return self._writer

    async def _listen(self, reader: asyncio.StreamReader, process: Any) -> None:
        """Take in what comes, until the process has ended."""
        try:
            while True:
                key, outcome = await _receive(reader)
                future = self._waiting.get(key)
                if future is not None and not future.done():
                    future.set_result(outcome) if isinstance(outcome, Episode) else future.set_exception(outcome)
        except (asyncio.IncompleteReadError, ConnectionError):
            await asyncio.to_thread(_end, process)
            gone = PlayerGoneError(f"process {process.pid} has ended with exit code {process.exitcode}")
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(gone)


def _start(open_: Open, share: int, channel: socket.socket) -> Any:
    """Begin a process. A terminal's signals, and a scheduler's, reach all processes of a run: they are for the first one to heed."""
    process = multiprocessing.get_context("spawn").Process(target=_main, args=(open_, share, channel), name="toolroll")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _QUIET)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _end(process: Any) -> None:
    process.join(_GRACE)
    if process.is_alive():
        process.kill()
        process.join()


def _main(open_: Open, share: int, channel: socket.socket) -> None:
    """The process. Its own children get the signals as usual: neither a mask nor an ignored signal may be left to them."""
    for number in _QUIET:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _QUIET)
    asyncio.run(_serve(open_, share, channel))


async def _serve(open_: Open, share: int, channel: socket.socket) -> None:
    """Play what is asked for, until nobody is there any more."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=_LIMIT)
    async with AsyncExitStack() as stack:
        opening = asyncio.create_task(_opened(open_, share, stack))
        playing: set[asyncio.Task[None]] = set()
        try:
            while True:
                task = asyncio.create_task(_answer(await _receive(reader), opening, writer))
                playing.add(task)
                task.add_done_callback(playing.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            for ending in (opening, *playing):
                ending.cancel()
            await asyncio.gather(opening, *playing, return_exceptions=True)


async def _opened(open_: Open, share: int, stack: AsyncExitStack) -> tuple[Runner, dict[str, Task]]:
    runner, tasks = await open_(share, stack)
    await stack.enter_async_context(paced_garbage())
    return runner, {task.id: task for task in tasks}


async def _answer(key: EpisodeKey, opening: asyncio.Task[tuple[Runner, dict[str, Task]]], writer: asyncio.StreamWriter) -> None:
    task_id, sample = key
    try:
        runner, tasks = await asyncio.shield(opening)
        outcome: Episode | Exception = await runner.play(tasks[task_id], sample)
    except ToolrollError as error:
        outcome = error
    except Exception as error:  # noqa: BLE001 - the process's border: the one that began it ends the run
        outcome = RolloutError(f"a worker failed: {error!r}")
    _send(writer, (key, outcome))


def _send(writer: asyncio.StreamWriter, message: tuple[Any, ...]) -> None:
    try:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - an environment's `info` may hold anything; the episode file puts it in words
        key, episode = message
        data = pickle.dumps((key, from_line(to_line(episode))), protocol=pickle.HIGHEST_PROTOCOL)
    if not writer.is_closing():  # else the other side is gone, which is said where this one reads
        writer.write(_LENGTH.pack(len(data)) + data)


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))  # from a process of our own, over a pair of sockets
