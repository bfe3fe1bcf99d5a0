"""`Executor`: threads for blocking environments and users.

Python cannot end a thread: a call that its caller has given up runs on. Here such a call gives its
place back, and another thread takes it. Neither anyio's `to_thread` nor `concurrent.futures` fits:
their threads keep the process from ending, and a pool of `concurrent.futures` does not give the
place of a call that hangs back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from toolroll.rollout.errors import UsageError

T = TypeVar("T")

MOST_GIVEN_UP = 64


class RunsOffLoop(Protocol):
    """What an agent without tokens needs of a `ServedModel`."""

    def off_loop(
        self,
        function: Callable[..., T],
        *args: Any,
        begun: Callable[[], None] | None = None,
        what: str = "",
    ) -> Awaitable[T]:
        """Run blocking `function` in a thread; `begun` is called when one is there for it."""
        ...


class Executor:
    """At most `threads` blocking calls at once, in the order of their coming. An async context
    manager.

    Calls that were given up do not count among them, up to `most_given_up` more than `threads`
    that still run; beyond these every call raises `UsageError`. Its threads do not keep the
    process from ending.
    """

    def __init__(self, threads: int, *, most_given_up: int = MOST_GIVEN_UP) -> None:
        if threads < 1:
            raise ValueError(f"an executor needs at least 1 thread, not {threads}")
        self._free = threads
        self._most_given_up = threads + most_given_up
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._idle: deque[None] = deque()  # one entry for each thread that waits, or is about to
        self._given_up: set[_Call] = set()
        self._threads: set[str] = set()
        self._numbers = itertools.count(1)
        self._closed = False
        self._end = weakref.finalize(self, _end, self._calls, self._threads)
        self._end.atexit = False

    async def off_loop(
        self,
        function: Callable[..., T],
        *args: Any,
        begun: Callable[[], None] | None = None,
        what: str = "",
    ) -> T:
        """Run blocking `function` in a thread. If the caller is cancelled before it begins, it is
        not run.

        `begun` is called on the event loop when a thread is there for it; `what` names the call in
        messages.
        """
        await self._place()
        call = _Call(partial(function, *args), what)
        try:
            self._check()
            self._start(call)
            if begun is not None:
                begun()
            result: T = await call.future
            return result
        finally:
            if not call.ended:
                self._given_up.add(call)
                if call.ended:  # meanwhile
                    self._given_up.discard(call)
            self._give_back()
            del call  # with an error and its traceback it is a reference cycle

    def close(self) -> None:
        """Cancel what waits, and let each thread end with its call. Not thread-safe."""
        self._closed = True
        for future in self._waiting:
            if not future.get_loop().is_closed():
                future.cancel()
        self._end()

    async def __aenter__(self) -> Executor:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the executor is closed: nothing more can be run in it")
        if len(self._given_up) >= self._most_given_up:
            names = Counter(call.what for call in list(self._given_up)).most_common(3)
            raise UsageError(
                f"{len(self._given_up)} calls that were given up still run, each in a thread of its own: "
                f"{', '.join(f'{what} ({count})' for what, count in names)}. "
                "Give what they wait for a time limit of its own, or raise --step-timeout."
            )

    async def _place(self) -> None:
        """Take one of the places for calls at once, or wait for it."""
        self._check()
        if self._free:
            self._free -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # it was handed over in the same moment
                self._give_back()
            raise

    def _give_back(self) -> None:
        """Hand the place over to the next that waits."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return
        self._free += 1

    def _start(self, call: _Call) -> None:
        try:
            self._idle.pop()
        except IndexError:
            name = f"toolroll-{next(self._numbers)}"
            given = (self._calls, self._idle, self._given_up, self._threads)
            try:
                threading.Thread(target=_work, args=given, name=name, daemon=True).start()
            except RuntimeError:
                call.ended = True
                raise
            self._threads.add(name)
        self._calls.put(call)


def _work(calls: SimpleQueue[_Call | None], idle: deque[None], given_up: set[_Call], threads: set[str]) -> None:
    """Run one thread. It does not hold its executor, so that one that was forgotten ends."""
    while (call := calls.get()) is not None:
        call.run()
        call.ended = True
        if call in given_up:  # another thread has taken its place
            given_up.discard(call)
            threads.discard(threading.current_thread().name)
            return
        idle.append(None)  # before the result is known, and another thread started for the next call
        call.hand_back()
        del call  # or its result would be held until the next one


def _end(calls: SimpleQueue[_Call | None], threads: set[str]) -> None:
    for _ in range(len(threads)):
        calls.put(None)


class _Call:
    """One call, and how it ended. `ended`: its thread is done with it."""

    __slots__ = ("ended", "error", "function", "future", "loop", "result", "what")

    def __init__(self, function: partial[Any], what: str) -> None:
        self.function = function
        self.what = what or getattr(function.func, "__qualname__", "a call")
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """In the thread: run it, unless nobody waits for it any more."""
        try:
            self.result = None if self.future.cancelled() else self.function()
        except StopIteration as error:  # no future takes one
            self.error = RuntimeError("the blocking call raised a StopIteration")
            self.error.__cause__ = error
        except BaseException as error:  # noqa: BLE001 - the caller's border: it is raised there
            self.error = error
        finally:
            del self  # it is in the error's traceback

    def hand_back(self) -> None:
        """In the thread: wake the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)
