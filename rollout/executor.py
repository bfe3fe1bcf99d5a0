"""`Executor`: threads for blocking environments and users.

A blocking step crosses threads twice, and what that costs is a part of what its turn costs. Here it is an entry in a queue on the way
there and one in a list on the way back, and the event loop is woken once for all that have come back meanwhile; a pool of
`concurrent.futures`, with a future, a lock and a wake-up for each call, took some 75 us of CPU more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class RunsOffLoop(Protocol):
    """What an agent without tokens needs of a `ServedModel`."""

    def off_loop(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Awaitable[T]:
        """Run blocking `function` away from the event loop."""
        ...


class Executor:
    """At most `threads` blocking calls at once; those beyond wait in the order of their coming. An async context manager.

    Its threads do not keep the process from ending: what blocks for ever blocks nothing but its thread.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"an executor needs at least 1 thread, not {threads}")
        self._most = threads
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._idle: deque[None] = deque()  # one entry for each thread that waits, or is about to
        self._numbers = itertools.count(1)
        self._count = 0
        self._closed = False
        self._returns: _Returns | None = None
        self._end = weakref.finalize(self, _end, self._calls, threads)
        self._end.atexit = False

    async def off_loop(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run blocking `function` in a thread. Where the caller is cancelled before it has begun, it is not run."""
        if self._closed:
            raise RuntimeError("the executor is closed: nothing more can be run in it")
        loop = asyncio.get_running_loop()
        returns = self._returns
        if returns is None or returns.loop is not loop:
            returns = self._returns = _Returns(loop)
        future: asyncio.Future[T] = loop.create_future()
        try:
            self._idle.pop()
        except IndexError:
            if self._count < self._most:
                name = f"toolroll-{next(self._numbers)}"
                threading.Thread(target=_work, args=(self._calls, self._idle), name=name, daemon=True).start()
                self._count += 1
        self._calls.put(_Call(returns, future, partial(function, *args, **kwargs)))  # last: where no thread starts, nothing is left
        try:
            return await future
        finally:
            del future  # with an error and its traceback it is a reference cycle, and the collector comes seldom in a run

    def close(self) -> None:
        """Cancel what has not begun, and let the threads end when what they run has ended. In the thread of the event loop."""
        self._closed = True
        with contextlib.suppress(Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None and not call.returns.loop.is_closed():
                    call.future.cancel()
        self._end()

    async def __aenter__(self) -> Executor:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


def _work(calls: SimpleQueue[_Call | None], idle: deque[None]) -> None:
    """One thread. It holds nothing of its executor but these, so that one that was forgotten ends."""
    while (call := calls.get()) is not None:
        if not call.future.cancelled():
            call.run()
        idle.append(None)  # before anybody hears of the result, who would start another thread for the next call
        call.returns.add(call)
        del call  # or its result would be held until the next one


def _end(calls: SimpleQueue[_Call | None], threads: int) -> None:
    for _ in range(threads):
        calls.put(None)


class _Call:
    """One call, and how it ended."""

    __slots__ = ("error", "function", "future", "result", "returns")

    def __init__(self, returns: _Returns, future: asyncio.Future[Any], function: Callable[[], Any]) -> None:
        self.returns, self.future, self.function = returns, future, function
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except StopIteration as error:  # no future takes one
            self.error = RuntimeError("the blocking call raised a StopIteration")
            self.error.__cause__ = error
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.error = error
        finally:
            del self  # it is in the error's traceback


class _Returns:
    """What has come back to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[_Call] = deque()
        self._woken = False

    def add(self, call: _Call) -> None:
        """In any thread: hand a call back."""
        self._calls.append(call)
        if not self._woken:  # else the loop will look after this entry: it takes the flag down before it looks
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        self._woken = False
        while self._calls:
            call = self._calls.popleft()
            if call.future.done():
                continue
            if call.error is not None:
                call.future.set_exception(call.error)
            else:
                call.future.set_result(call.result)
