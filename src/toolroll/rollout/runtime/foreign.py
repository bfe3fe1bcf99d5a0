"""The border to code of others: environments, user simulators, agents and factories.

Invariants: what such code raises is its own failure and never ends a run; a cancellation of the
running task always gets through, also if the code swallows it; so does a real Ctrl-C. A task of
such code is waited for until it is cancelled, and then for at most `LEAVE_SECONDS`.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from toolroll.rollout.errors import RolloutError

T = TypeVar("T")

LEAVE_SECONDS = 5.0
"""Seconds that a cancelled task of others may take to end."""


class ForeignExitError(RolloutError):
    """Code of others raised its cause, which is not an `Exception` (`SystemExit`, say)."""


@contextmanager
def guarded() -> Iterator[None]:
    """Run code of others within it, in a coroutine or in a worker thread.

    Raise `ForeignExitError` from any `BaseException` that is not an `Exception`. Raise
    `CancelledError` if the running task is being cancelled: `CancelledError` without such a
    request was raised by the code itself.
    """
    task = _running_task()
    requests = task.cancelling() if task is not None else 0
    try:
        yield
    except BaseException as error:
        if (
            task is not None
            and task.cancelling() > requests
            and not isinstance(error, asyncio.CancelledError)
        ):
            raise asyncio.CancelledError from error
        if isinstance(error, Exception) or _ends_task(error, task):
            raise
        raise _exit_of(error) from error
    if task is not None and task.cancelling() > requests:
        raise asyncio.CancelledError


async def call_in_task(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`, and await what it returned if that can be awaited.

    Run it as a separate task, for `outcome`: code that cancels its task, and maybe continues after
    that, then cancels nothing else.
    """
    task = _running_task()
    try:
        found = function(*args)
        return await found if inspect.isawaitable(found) else found
    except BaseException as error:
        if isinstance(error, Exception | asyncio.CancelledError) or _ends_task(error, task):
            raise
        raise _exit_of(error) from error


async def outcome(task: asyncio.Task[T]) -> T:
    """Return the result of `task`, which runs code of others, or raise its error.

    If the caller is cancelled, so is `task`. If that does not end it, it keeps running by itself:
    nothing waits for it, not even `asyncio.run`.
    """
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(_retrieve)
        task.cancel()
        try:
            await asyncio.wait([task], timeout=LEAVE_SECONDS)
        finally:
            if not task.done():
                asyncio.tasks._unregister_task(task)
        raise
    return task.result()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take the error of a task that nobody waits for, which asyncio would log."""
    if not task.cancelled():
        task.exception()


def _exit_of(error: BaseException) -> ForeignExitError:
    return ForeignExitError(f"{type(error).__name__} was raised")


def _ends_task(error: BaseException, task: asyncio.Task[object] | None) -> bool:
    """Return whether `error` came from outside of the guarded code."""
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    if isinstance(error, GeneratorExit):  # a coroutine that is closed is not run by its task
        return _running_task() is not task
    if isinstance(error, KeyboardInterrupt):  # asyncio.run's handler cancels the main task instead
        in_main = threading.current_thread() is threading.main_thread()
        return in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return False


def _running_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
