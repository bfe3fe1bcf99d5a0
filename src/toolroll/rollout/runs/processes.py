"""`ProcessRunner`: distributes the episodes of a run over processes on this machine.

Each process has its own event loop, engine client, template and environments. It sends finished
episodes to the parent process, and only the parent writes files. The invariants of `worker_pool`
hold. In addition:

- If a process dies, it is restarted. If its event loop does not respond for `_STALL` seconds, for
  example because code holds the GIL, it is killed.
- If the parent ends for any reason, the worker processes abort their requests at the engine, and
  exit as soon as their blocking calls return. Only a SIGKILL of a worker prevents this.
"""

from __future__ import annotations

import asyncio
import contextlib
import copyreg
import logging
import multiprocessing
import pickle
import signal
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from multiprocessing import resource_tracker
from operator import attrgetter
from typing import Any

from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.runs.runner import EpisodeKey, Runner, RunStoppedError, remaining
from toolroll.rollout.runs.worker_pool import (
    WorkerDiedError,
    play_on_workers,
    split_concurrency,
)
from toolroll.rollout.runtime.blocked_loop import watched_loop
from toolroll.rollout.runtime.event_loop import run
from toolroll.rollout.runtime.garbage import paced_garbage
from toolroll.rollout.runtime.jsonable import plain
from toolroll.rollout.types import Episode, Task, Turn, WeightVersion

logger = logging.getLogger(__name__)

Open = Callable[[int, AsyncExitStack], Awaitable[tuple[Runner, Sequence[Task]]]]
"""A function that is called in the worker process with the number of its concurrent episodes and an
exit stack. It returns the runner and the tasks. It is pickled, so it must be a module-level
function, or a `functools.partial` of one.
"""

_GRACE, _LATE = 10.0, 1.0
_STALL, _BEAT = 300.0, 1.0  # seconds: without a response, and between two pings
_LIMIT = 1 << 22  # bytes read ahead: an episode has several hundred thousand
_PING = "ping"
_LENGTH = struct.Struct("!Q")
_QUIET = (signal.SIGINT, signal.SIGTERM)


def _pickle_by_field(kind: type[Turn | WeightVersion]) -> None:
    """Make `kind` pickle as its values. Python's default for frozen dataclasses with slots is slow:
    it doubles the time for pickling an episode.
    """
    values = attrgetter(*(part.name for part in fields(kind)))
    copyreg.pickle(kind, lambda record: (kind, values(record)))


_pickle_by_field(Turn)
_pickle_by_field(WeightVersion)


class ProcessRunner:
    """Plays a run in `processes` processes, with `concurrency` concurrent episodes in total."""

    def __init__(self, open_: Open, *, processes: int, concurrency: int, samples: int) -> None:
        self._open = open_
        self._shares = split_concurrency(concurrency, processes)
        self._samples = samples

    async def run(
        self,
        tasks: Sequence[Task],
        on_episode: Callable[[Episode], None],
        *,
        done: Collection[EpisodeKey] = frozenset(),
    ) -> None:
        """Play every (task, sample) that is not in `done`, as `Runner.run` does.

        Raise `RolloutError` if processes keep dying.
        """
        todo = remaining(tasks, self._samples, done)
        players = [_Process(self._open, share) for share in self._shares[: len(todo)]]
        try:
            await play_on_workers(todo, [(player, player.share) for player in players], on_episode)
        finally:
            await asyncio.gather(*(player.close() for player in players))


class _Process:
    """The parent's handle of a worker process. The process is started for its first episode. If it
    dies, it is restarted for the next one.
    """

    def __init__(self, open_: Open, share: int) -> None:
        self.share = share
        self._open = open_
        self._waiting: dict[EpisodeKey, asyncio.Future[Episode]] = {}
        self._life: asyncio.Task[None] | None = None
        self._writer: asyncio.Future[asyncio.StreamWriter]
        """Set by `play`: done when the process has started."""
        self._responded = asyncio.Event()

    async def play(self, key: EpisodeKey) -> Episode:
        """Play one episode."""
        if self._life is None or self._life.done():
            self._writer = asyncio.get_running_loop().create_future()
            self._life = asyncio.create_task(self._live(self._writer))
        writer = await asyncio.shield(self._writer)
        future: asyncio.Future[Episode] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            _send(writer, key)
            return await future
        finally:
            self._waiting.pop(key, None)

    async def close(self) -> None:
        """End the process. It has `_GRACE` seconds to cancel its episodes and abort their requests,
        and is then killed.
        """
        if self._life is not None:
            # if the process could not be started, `play` has raised the error
            with contextlib.suppress(Exception):
                (await asyncio.shield(self._writer)).close()
            await self._life

    async def _live(self, started: asyncio.Future[asyncio.StreamWriter]) -> None:
        """Run one process from its start to its end.

        Wait for the process, not for its socket, because a child that the process forked may keep
        the socket open.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = _start(self._open, self.share, theirs)
        except BaseException as error:
            ours.close()
            started.set_exception(RolloutError(f"a process cannot be started: {error!r}"))
            raise
        ended = _ending(process)
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=_LIMIT)
            started.set_result(writer)
            listening = asyncio.create_task(self._listen(reader))
            watching = asyncio.create_task(self._watch(writer, process))
            await asyncio.wait({ended, listening}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended, listening}, timeout=_LATE if ended.done() else _GRACE)
            listening.cancel()
            watching.cancel()
            writer.close()
        finally:
            process.kill()
            ours.close()
            if not started.done():
                started.set_exception(RolloutError(f"process {process.pid} cannot be reached"))
        await ended
        gone = WorkerDiedError(f"process {process.pid} ended with exit code {process.exitcode}")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(gone)
        # If another thread has reaped the process, it still seems to be running. `close` then
        # raises an error.
        with contextlib.suppress(ValueError):
            process.close()

    async def _watch(self, writer: asyncio.StreamWriter, process: Any) -> None:
        """Kill the process if it does not respond. Its start may take any time."""
        limit = None
        while not writer.is_closing():
            self._responded.clear()
            _send(writer, (_PING,))
            try:
                async with asyncio.timeout(limit):
                    await self._responded.wait()
            except TimeoutError:
                logger.warning("process %d does not respond, and is killed", process.pid)
                process.kill()
                return
            limit = _STALL
            await asyncio.sleep(_BEAT)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                key, outcome = await _receive(reader)
                self._responded.set()
                future = self._waiting.get(key)
                if future is not None and not future.done():
                    future.set_result(outcome) if isinstance(
                        outcome, Episode
                    ) else future.set_exception(outcome)


def _ending(process: Any) -> asyncio.Future[None]:
    """Return a future that is done when the process has ended. A separate thread waits for the
    process, so that no thread of a shared pool is blocked.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def wait() -> None:
        process.join()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
            loop.call_soon_threadsafe(ended.set_result, None)

    threading.Thread(target=wait, name=f"toolroll-{process.pid}", daemon=True).start()
    return ended


def _start(open_: Open, share: int, channel: socket.socket) -> Any:
    """Start a worker process in which SIGINT and SIGTERM have no effect.

    A terminal or a scheduler sends these signals to all processes of a run, but only the parent
    must handle them.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=_main, args=(open_, share, channel), name="toolroll"
    )
    # Start the resource tracker before the signals are blocked, because its start unblocks them
    # (Python 3.11).
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _QUIET)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _main(open_: Open, share: int, channel: socket.socket) -> None:
    """Run the worker process.

    SIGINT and SIGTERM get an empty handler. They are not ignored or blocked, because processes that
    an environment starts would inherit that, and could then not be ended by these signals.
    """
    for number in _QUIET:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _QUIET)
    run(_serve(open_, share, channel))


async def _serve(open_: Open, share: int, channel: socket.socket) -> None:
    """Play the episodes that the parent requests, until the parent closes the connection."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=_LIMIT)
    async with AsyncExitStack() as stack:
        opening = asyncio.create_task(_opened(open_, share, stack))
        playing: set[asyncio.Task[None]] = set()
        try:
            while True:
                key = await _receive(reader)
                if key == (_PING,):
                    _send(writer, (_PING, None))
                    continue
                task = asyncio.create_task(_answer(key, opening, writer))
                playing.add(task)
                task.add_done_callback(playing.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            for ending in (opening, *playing):
                ending.cancel()
            await asyncio.gather(opening, *playing, return_exceptions=True)


async def _opened(open_: Open, share: int, stack: AsyncExitStack) -> tuple[Runner, dict[str, Task]]:
    runner, tasks = await open_(share, stack)
    stack.enter_context(paced_garbage(enabled=runner.settings.pace_gc))
    stack.enter_context(watched_loop())
    return runner, {task.id: task for task in tasks}


async def _answer(
    key: EpisodeKey,
    opening: asyncio.Task[tuple[Runner, dict[str, Task]]],
    writer: asyncio.StreamWriter,
) -> None:
    task_id, sample = key
    try:
        runner, tasks = await asyncio.shield(opening)
        outcome: Episode | Exception = _plain(await runner.play(tasks[task_id], sample))
    except asyncio.CancelledError:
        # this message is delivered only if the parent did not request the cancellation
        _send(writer, (key, RolloutError("the episode was cancelled in its process")))
        raise
    except UsageError as error:
        outcome = UsageError(str(error))
    except RunStoppedError as error:
        outcome = RunStoppedError(str(error), plain(error.failure))
    except Exception as error:  # noqa: BLE001 - it is raised in the parent, which ends the run
        outcome = RolloutError(
            str(error) if isinstance(error, RolloutError) else f"a worker failed: {error!r}"
        )
    _send(writer, (key, outcome))


def _plain(episode: Episode) -> Episode:
    """Return the episode with the environment's values converted to JSON types, because it may be
    impossible to pickle or unpickle third-party objects.
    """
    result = episode.result
    sent = replace(
        result,
        messages=plain(result.messages),
        tools=plain(result.tools),
        info=plain(result.info),
        metrics=plain(result.metrics),
        step_rewards=plain(result.step_rewards),
    )
    return replace(episode, result=sent)


def _send(writer: asyncio.StreamWriter, message: tuple[Any, ...]) -> None:
    try:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - without an answer the parent would wait forever
        data = pickle.dumps(
            (message[0], RolloutError(f"the episode cannot be sent from its process: {error!r}"))
        )
    if not writer.is_closing():  # otherwise the parent has ended, which `_receive` reports
        writer.write(_LENGTH.pack(len(data)) + data)


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    # unpickling is safe: the data comes from our own process, over a socket pair
    return pickle.loads(await reader.readexactly(length))
