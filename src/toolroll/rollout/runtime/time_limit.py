"""Time limits that pause while a server is down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar


class _Limit:
    """A limit, and how many `not_counted` pause it now, in whatever tasks."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._pauses = 0
        self._left: float | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the limit until the last of these contexts ends."""
        loop = asyncio.get_running_loop()
        end = self._timeout.when()
        if not self._pauses and end is not None and not self._timeout.expired():
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
        with suppress(RuntimeError):  # the limit has ended: this task outlived it
            self._timeout.reschedule(when)


_pausable: ContextVar[tuple[_Limit, ...]] = ContextVar("pausable", default=())
"""The limits of the running task and of the tasks that it started: an episode's and a step's."""


@contextmanager
def pausable(limit: asyncio.Timeout) -> Iterator[None]:
    """Let `not_counted` pause `limit`, which has been entered, and those around it."""
    token = _pausable.set((*_pausable.get(), _Limit(limit)))
    try:
        yield
    finally:
        with suppress(ValueError):  # a forgotten coroutine is closed in another context
            _pausable.reset(token)


@contextmanager
def not_counted() -> Iterator[None]:
    """Pause the time limits around it, if there are any."""
    with ExitStack() as stack:
        for limit in _pausable.get():
            stack.enter_context(limit.paused())
        yield
