"""Time limits that do not count the time while a server is down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar


class _Limit:
    """A time limit. It is paused while a `not_counted` context is active in any of its tasks."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout: asyncio.Timeout | None = timeout
        self._pauses = 0
        self._left: float | None = None

    def close(self) -> None:
        """Let go of the timeout, and so of its task. Connections that were opened in the task's
        context keep this object as long as they are open.
        """
        self._timeout = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the limit. With overlapping contexts, it continues when the last one ends."""
        loop = asyncio.get_running_loop()
        timeout = self._timeout
        end = None if timeout is None or timeout.expired() else timeout.when()
        if not self._pauses and end is not None:
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


@contextmanager
def not_counted() -> Iterator[None]:
    """Pause all `pausable` limits of the running task."""
    with ExitStack() as stack:
        for limit in _pausable.get():
            stack.enter_context(limit.paused())
        yield
