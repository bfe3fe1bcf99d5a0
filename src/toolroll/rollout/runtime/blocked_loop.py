"""`watched_loop`: ends third-party code that blocks the event loop beyond its time limit.

asyncio cannot end such code, because its time limits need the event loop. So a thread watches the
limits. If one has passed, the thread sends a signal to the main thread, and the signal's handler
raises `LoopBlocked` in the code. This also interrupts `time.sleep`, locks and sockets. It does not
interrupt C code that never returns to Python (docs/reliability.md).

Invariant: the handler raises only while a task that was passed to `watch` runs, and only after the
task's time limit. So it never interrupts another episode, or toolroll's own code other than code
that the task calls.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Any

from toolroll.rollout.runtime.time_limit import Deadline, current_deadline

# Ignored by default, and hardly used. Windows does not have it.
_SIGNAL: int | None = getattr(signal, "SIGURG", None)
_INTERVAL = 0.25
_GRACE = 1.0
"""The number of seconds after a limit in which the event loop should have ended the code."""


class LoopBlocked(BaseException):
    """Raised in code that has blocked the event loop beyond its time limit."""


_deadlines: dict[asyncio.Task[Any] | None, Deadline] = {}
"""The tasks of third-party code that have not ended."""

_interrupted: deque[tuple[float, asyncio.Task[Any]]] = deque(maxlen=1)
"""When code was last interrupted, on the event loop's clock, and its task."""


def watch(task: asyncio.Task[Any]) -> None:
    """Apply the time limits of the running task to `task` even if it blocks the event loop."""
    _deadlines[task] = current_deadline()
    task.add_done_callback(_deadlines.pop)


def blocker_since(start: float) -> asyncio.Task[Any] | None:
    """Return the task that was interrupted last, if that was after `start`, a time on the event
    loop's clock. No time limit could be kept while it blocked the loop.
    """
    return next((task for when, task in _interrupted if when >= start), None)


@contextmanager
def watched_loop() -> Iterator[None]:
    """Enforce the time limits of watched tasks in this context. Without effect outside the main
    thread, on Windows, or if the program has a handler for the signal.
    """
    main = threading.main_thread()
    if (
        threading.current_thread() is not main
        or _SIGNAL is None
        or signal.getsignal(_SIGNAL) != signal.SIG_DFL
    ):
        yield
        return
    ended, number = threading.Event(), _SIGNAL

    def look() -> None:
        while not ended.wait(_INTERVAL):
            if any(_is_over(deadline) for deadline in list(_deadlines.values())):
                signal.pthread_kill(main.ident or 0, number)

    signal.signal(_SIGNAL, _interrupt)
    thread = threading.Thread(target=look, name="toolroll-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # so that no signal comes after the handler is gone
        signal.signal(_SIGNAL, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return
    if task is not None and task in _deadlines and _is_over(_deadlines[task]):
        _interrupted.append((monotonic(), task))
        raise LoopBlocked


def _is_over(deadline: Deadline) -> bool:
    # Not the loop's time, which uvloop updates only between callbacks. It is the same clock.
    when = deadline()
    return when is not None and monotonic() > when + _GRACE
