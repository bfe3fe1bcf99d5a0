"""`Threads`: runs blocking calls outside the event loop, each in its own thread.

Python cannot end a thread. So if the caller of a blocking call is cancelled, the call keeps
running. Such a call is given up: it no longer counts as one of the concurrent calls. anyio's
`to_thread` and `concurrent.futures` are not used, because their threads keep the process from
exiting. A new thread for each call costs 40 us of CPU more than a thread pool. This is little
compared with a blocking call, and there are no threads to keep, reuse or close.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from toolroll.rollout.errors import EnvironmentFailure, UsageError

T = TypeVar("T")

MOST_GIVEN_UP = 64
_GRACE = 30.0
_AT_ONCE = 32
OF_ENVIRONMENT = ContextVar("of_environment", default="")
"""The name of the environment, in tasks that run its coroutines and in tasks that these create."""


async def call_of_size(function: Callable[..., T], *args: Any, large: bool) -> T:
    """Call `function`. If `large` is True, call it in a thread. Use this only for calls that end by
    themselves, because a thread cannot be ended.
    """
    return await asyncio.to_thread(function, *args) if large else function(*args)


class BlockingRunner(Protocol):
    """Runs blocking calls in threads, as `Model` and `Threads` do."""

    def run_in_thread(
        self,
        function: Callable[..., T],
        *args: Any,
        begun: Callable[[], None] | None = None,
        what: str = "",
    ) -> Awaitable[T]:
        """Run the blocking `function` in a thread. `begun` is called when the thread starts."""
        ...


class Threads:
    """Runs at most `most` blocking calls at the same time, in order of arrival, on one event loop
    at a time.

    Calls that were given up do not count. But if `most` + `most_given_up` or more of them are still
    running, a new call waits until one of them ends. If none ends within `grace` seconds, the new
    call raises `UsageError`. No thread keeps the process from exiting.
    """

    def __init__(
        self, most: int, *, most_given_up: int = MOST_GIVEN_UP, grace: float = _GRACE
    ) -> None:
        if most < 1:
            raise ValueError(f"at least 1 call must be allowed at once, not {most}")
        self._most = most
        self._most_given_up = most + most_given_up
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(most)
        self._grace = grace
        self._given_up: dict[asyncio.Future[Any], tuple[threading.Thread, str]] = {}
        self._ended = asyncio.Event()

    async def run_in_thread(
        self,
        function: Callable[..., T],
        *args: Any,
        begun: Callable[[], None] | None = None,
        what: str = "",
    ) -> T:
        """Run the blocking `function` in a thread. If the caller is cancelled before the thread
        starts, `function` is not called.

        `begun` is called on the event loop when the thread starts. `what` names the call in
        messages.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a semaphore belongs to one loop
            self._loop, self._places = loop, asyncio.Semaphore(self._most)
            self._ended = asyncio.Event()
        async with self._places:
            if self._given_up and self._too_many():
                await self._wait_for_room()
            future: asyncio.Future[T] = loop.create_future()
            arguments = (future, function, args, self._end)
            thread = threading.Thread(target=_run, args=arguments, name="toolroll", daemon=True)
            del arguments
            thread.start()
            if begun is not None:
                begun()
            try:
                return await future
            finally:
                if future.cancelled():
                    description = what or getattr(function, "__qualname__", "a call")
                    self._given_up[future] = thread, description
                del future  # it refers to an error, whose traceback refers to this frame: a cycle

    def _too_many(self) -> bool:
        given_up = self._given_up.items()
        self._given_up = {future: call for future, call in given_up if call[0].is_alive()}
        return len(self._given_up) >= self._most_given_up

    async def _wait_for_room(self) -> None:
        try:
            async with asyncio.timeout(self._grace):
                while self._too_many():
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            if not self._too_many():
                return
            names = Counter(call for _, call in self._given_up.values()).most_common(3)
            raise UsageError(
                f"{len(self._given_up)} calls exceeded their time limit or were cancelled, and are "
                f"still running, each in its own thread: "
                f"{', '.join(f'{call} ({count})' for call, count in names)}. Add a timeout to the "
                f"operation that blocks them, or raise the time limit (--step-timeout, "
                f"--episode-timeout)."
            ) from None

    def _end(self, future: asyncio.Future[Any]) -> None:
        """Record that a call that was given up has ended."""
        self._given_up.pop(future, None)
        self._ended.set()


class LoopThreads(ThreadPoolExecutor):
    """The default executor of an event loop, which runs calls of `asyncio.to_thread`. Environments
    have threads of their own, so that calls that hang take no thread from anything else.

    `submit` raises `EnvironmentFailure` if `MOST_GIVEN_UP` calls of environments are still running
    although the tasks that waited for them are over.
    """

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="toolroll-loop")
        self._of_environments = ThreadPoolExecutor(MOST_GIVEN_UP + _AT_ONCE, "environment")
        self._calls: dict[Future[Any], tuple[str, asyncio.Task[Any] | None]] = {}

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `fn` in a thread."""
        environment = OF_ENVIRONMENT.get()
        if not environment:
            return super().submit(fn, *args, **kwargs)
        calls = list(self._calls.values())
        given_up = [name for name, task in calls if task is not None and task.done()]
        if len(given_up) >= MOST_GIVEN_UP:
            names = sorted(set(given_up))
            raise EnvironmentFailure(
                f"{len(given_up)} calls of asyncio.to_thread exceeded their time limit and are "
                f"still running ({', '.join(names[:3])}, ...): add a timeout to the operation that "
                "blocks them"
            )
        future = self._of_environments.submit(fn, *args, **kwargs)
        self._calls[future] = environment, asyncio.current_task()
        future.add_done_callback(self._calls.pop)
        return future


def end_within(seconds: float, status: int) -> None:
    """End the process with `status` if it has not ended after `seconds`. Call this last: threads
    that third-party code left behind, or its exit functions, may keep the process running.
    """

    def end() -> None:
        time.sleep(seconds)
        running = [
            thread.name
            for thread in threading.enumerate()
            if not thread.daemon and thread is not threading.main_thread()
        ]
        cause = f"the threads {', '.join(running)}" if running else "an exit function"
        with contextlib.suppress(Exception):  # the streams may be closed
            sys.stdout.flush()
            sys.stderr.write(f"toolroll: the process is ended, although {cause} still runs\n")
            sys.stderr.flush()
        os._exit(status)

    threading.Thread(target=end, name="toolroll-end", daemon=True).start()


def _run(
    future: asyncio.Future[Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    end: Callable[[asyncio.Future[Any]], None],
) -> None:
    """Call `function` in this thread. Pass the result or the error to the event loop."""
    result: Any = None
    failure: BaseException | None = None
    try:
        result = function(*args)
    except StopIteration as error:  # a future does not accept this error
        failure = RuntimeError("the blocking call raised a StopIteration")
        failure.__cause__ = error
    except BaseException as error:  # noqa: BLE001 - it is raised in the caller
        failure = error
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits
        future.get_loop().call_soon_threadsafe(_settle, future, result, failure, end)
    del future, function, args, failure  # the error's traceback keeps this frame alive


def _settle(
    future: asyncio.Future[Any],
    result: Any,
    failure: BaseException | None,
    end: Callable[[asyncio.Future[Any]], None],
) -> None:
    if future.done():
        end(future)
    elif failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)
