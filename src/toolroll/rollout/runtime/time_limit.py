"""Time limits that do not count the time while a server is down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar


class _Limit:
    """A time limit. It is paused while a `not_counted` context is active in any of its tasks."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout: asyncio.Timeout | None = timeout
        self._last_end: float | None = None
        self._pauses = 0
        self._left: float | None = None

    @property
    def end(self) -> float | None:
        """The time at which the limit ends, or None if it is paused or not set."""
        return self._last_end if self._timeout is None else self._timeout.when()

    def close(self) -> None:
        """Let go of the timeout, and so of its task. Connections that were opened in the task's
        context keep this object as long as they are open.
        """
        self._last_end, self._timeout = self.end, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the limit. With overlapping contexts, it continues when the last one ends."""
        loop = asyncio.get_running_loop()
        end = self.end
        if not self._pauses and end is not None and not self._expired():
            self._left = end - loop.time()
            self._reschedule(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses and self._left is not None:
                self._reschedule(loop.time() + self._left)
                self._left = None

    def _expired(self) -> bool:
        return self._timeout is None or self._timeout.expired()

    def _reschedule(self, when: float | None) -> None:
        if self._timeout is not None:
            with suppress(RuntimeError):  # the limit has already ended
                self._timeout.reschedule(when)


_pausable: ContextVar[tuple[_Limit, ...]] = ContextVar("pausable", default=())
"""The limits of the running task, such as an episode's limit and a step's limit. Tasks that it
starts inherit them.
"""


@contextmanager
def pausable(limit: asyncio.Timeout) -> Iterator[None]:
    """Make `not_counted` pause `limit`, in addition to the outer limits. The `async with` block of
    `limit` must have been entered.
    """
    added = _Limit(limit)
    token = _pausable.set((*_pausable.get(), added))
    try:
        yield
    finally:
        added.close()
        with suppress(ValueError):  # an abandoned coroutine is closed in another context
            _pausable.reset(token)


Deadline = Callable[[], float | None]
"""Returns the time, on the event loop's clock, at which a time limit ends; None if it is paused."""


def current_deadline() -> Deadline:
    """Return the earliest end of all `pausable` limits of the running task."""
    limits = _pausable.get()

    def earliest() -> float | None:
        return min((end for limit in limits if (end := limit.end) is not None), default=None)

    return earliest


@contextmanager
def not_counted() -> Iterator[None]:
    """Pause all `pausable` limits of the running task."""
    with ExitStack() as stack:
        for limit in _pausable.get():
            stack.enter_context(limit.paused())
        yield
