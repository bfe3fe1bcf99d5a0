"""`run`: does what `asyncio.run` does, but on uvloop's event loop if uvloop is installed.

Invariants, which `asyncio.run` does not have:

- Only the end of `main` ends the loop. If a task or a callback that third-party code left behind
  raises `SystemExit` or `KeyboardInterrupt`, or stops the loop, `main` continues.
- The loop is closed in bounded time, even if tasks suppress their cancellation or threads of the
  default executor do not end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from toolroll.rollout.runtime.foreign import LEAVE_SECONDS, abandon, retrieve
from toolroll.rollout.runtime.threads import LoopThreads

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

logger = logging.getLogger(__name__)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in a new event loop and return its result. Ctrl-C cancels `main`, and
    is then raised as `KeyboardInterrupt`.
    """
    # Not a context, because `Runner.close` waits without a limit.
    runner = asyncio.Runner(loop_factory=_loop_factory() or asyncio.new_event_loop)
    loop = runner.get_loop()
    loop.set_default_executor(LoopThreads())
    try:
        return _complete(runner, loop.create_task(_after_waiter(main)))
    finally:
        try:
            _complete(runner, loop.create_task(_leave(asyncio.all_tasks(loop))))
        finally:
            asyncio.set_event_loop(None)
            loop.close()


@contextmanager
def stop_signals(stop: Callable[[int], object]) -> Iterator[None]:
    """Call `stop` with the number of each SIGINT or SIGTERM that arrives in this context.

    uvloop does not restore the handlers when it closes its loop, so they are removed at the end.
    """
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def _complete(runner: asyncio.Runner, task: asyncio.Task[T]) -> T:
    """Run the loop until `task` is done, or until a second Ctrl-C."""
    while True:
        waiting: list[asyncio.Task[Any]] = []
        try:
            return runner.run(_outcome(task, waiting))
        except BaseException as error:
            # The first Ctrl-C cancels the waiting task. Code that was left behind does not.
            ctrl_c = isinstance(error, KeyboardInterrupt) and any(
                waiter.cancelling() for waiter in waiting
            )
            if task.done() or ctrl_c:
                raise
            logger.error(
                "code that was left behind on the event loop ended it (%s: %s); the run continues",
                type(error).__name__,
                error,
            )


async def _after_waiter(main: Coroutine[Any, Any, T]) -> T:
    """Let `_outcome` start to wait, then await `main`. Ctrl-C cancels only what `_outcome` already
    waits for, so `main` must not start earlier.
    """
    try:
        await asyncio.sleep(0)
        return await main
    finally:
        main.close()  # it may not have started


async def _outcome(task: asyncio.Task[T], waiting: list[asyncio.Task[Any]]) -> T:
    """Wait for `task`. Append the running task to `waiting`."""
    waiter = asyncio.current_task()
    assert waiter is not None
    waiting.append(waiter)
    waiter.add_done_callback(retrieve)  # `_complete` may have left it, and then retrieves nothing
    return await task


async def _leave(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the `tasks` and close the asynchronous generators. Abandon what does not end
    within `LEAVE_SECONDS`.
    """
    for task in tasks:
        task.add_done_callback(retrieve)
        task.cancel()
    loop = asyncio.get_running_loop()
    closing = loop.create_task(loop.shutdown_asyncgens())
    closing.add_done_callback(retrieve)
    _, stubborn = await asyncio.wait([*tasks, closing], timeout=LEAVE_SECONDS)
    for task in stubborn:
        abandon(task)
    if stubborn:
        logger.warning("%d tasks on the event loop did not end when cancelled", len(stubborn))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if find_spec("uvloop") is None:  # uvloop is an optional dependency
        return None
    import uvloop

    return uvloop.new_event_loop
