"""Time limits that stand still while a server is waited for that is down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

_pausable: ContextVar[tuple[asyncio.Timeout, ...]] = ContextVar("pausable", default=())
"""The limits of the running task, and of the tasks that it began: an episode's and a step's."""


@contextmanager
def pausable(limit: asyncio.Timeout) -> Iterator[None]:
    """Let `not_counted` pause `limit`, which has been entered, and those around it."""
    token = _pausable.set((*_pausable.get(), limit))
    try:
        yield
    finally:
        with suppress(ValueError):  # a coroutine that was forgotten is closed in another context
            _pausable.reset(token)


@contextmanager
def not_counted() -> Iterator[None]:
    """Pause the time limits around it, if there are any."""
    loop = asyncio.get_running_loop()
    running = [(limit, limit.when()) for limit in _pausable.get() if not limit.expired()]
    left = [(limit, end - loop.time()) for limit, end in running if end is not None]
    for limit, _ in left:
        _reschedule(limit, None)
    try:
        yield
    finally:
        for limit, seconds in left:
            _reschedule(limit, loop.time() + seconds)


def _reschedule(limit: asyncio.Timeout, when: float | None) -> None:
    with suppress(RuntimeError):  # it is over: this task outlived what it limits
        limit.reschedule(when)
