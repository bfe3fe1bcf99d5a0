"""The border to code of others: environments, user simulators, agents and factories.

Invariants: what such code raises is its own failure and never ends a run; a cancellation of the
running task always gets through, also if the code swallows it; so does a real Ctrl-C.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from toolroll.rollout.errors import RolloutError


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
        if task is not None and task.cancelling() > requests and not isinstance(error, asyncio.CancelledError):
            raise asyncio.CancelledError from error
        if isinstance(error, Exception) or _ends_task(error, task):
            raise
        raise ForeignExitError(f"{type(error).__name__} was raised") from error
    if task is not None and task.cancelling() > requests:
        raise asyncio.CancelledError


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
