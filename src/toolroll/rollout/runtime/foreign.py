"""Call third-party code: environments, user simulators, agents and factories.

Invariants:

- Any exception that third-party code raises, even `SystemExit`, is an error of that code and does
  not end the run.
- If the running task is cancelled, `CancelledError` is raised, even if third-party code suppresses
  it.
- A real Ctrl-C is raised as `KeyboardInterrupt`.
- If the caller is cancelled, a task that runs third-party code has `LEAVE_SECONDS` to end. After
  that, the task is abandoned.
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
"""The number of seconds that a cancelled task with third-party code may take to end."""


class ForeignExitError(RolloutError):
    """Third-party code raised an exception that is not an `Exception`, such as `SystemExit`. The
    original exception is the `__cause__`.
    """


@contextmanager
def guarded() -> Iterator[None]:
    """Run third-party code in this context, in a coroutine or in a worker thread.

    - If the running task was cancelled in the meantime, raise `CancelledError`.
    - Do not change an `Exception`, or an exception from outside the code, such as Ctrl-C.
    - Convert any other `BaseException` to `ForeignExitError`. An example is a `CancelledError` that
      nothing requested: the code itself raised it.
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
    """Call `function`. If its result is awaitable, await it.

    The caller must run this coroutine in a separate task, and pass this task to `outcome`. Then
    code that cancels its own task cancels nothing else.
    """
    task = _running_task()
    try:
        result = function(*args)
        return await result if inspect.isawaitable(result) else result
    except BaseException as error:
        if isinstance(error, Exception | asyncio.CancelledError) or _ends_task(error, task):
            raise
        raise _exit_of(error) from error


async def outcome(task: asyncio.Task[T]) -> T:
    """Return the result of `task`, which runs third-party code, or raise its error.

    If the caller is cancelled, cancel `task` and wait at most `LEAVE_SECONDS` for its end. If
    `task` is still running after that, abandon it: nothing waits for it, not even `asyncio.run`.
    """
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(retrieve)
        task.cancel()
        try:
            await asyncio.wait([task], timeout=LEAVE_SECONDS)
        finally:
            if not task.done():
                abandon(task)
        raise
    return task.result()


def abandon(task: asyncio.Task[Any]) -> None:
    """Make nothing wait for `task`, not even the end of the event loop."""
    asyncio.tasks._unregister_task(task)


def retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of `task`, because asyncio logs errors that nothing retrieves."""
    if not task.cancelled():
        task.exception()


def _exit_of(error: BaseException) -> ForeignExitError:
    return ForeignExitError(f"{type(error).__name__} was raised")


def _ends_task(error: BaseException, task: asyncio.Task[object] | None) -> bool:
    """Return True if `error` came from outside the third-party code: a requested cancellation, a
    coroutine that is closed, or Ctrl-C. `error` then ends the task and must not be converted.
    """
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    if isinstance(error, GeneratorExit):  # the coroutine is closed from outside its task
        return _running_task() is not task
    if isinstance(error, KeyboardInterrupt):  # asyncio.run turns Ctrl-C into a cancellation
        in_main = threading.current_thread() is threading.main_thread()
        return in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return False


def _running_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
