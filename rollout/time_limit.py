"""The time limit of an episode, which stands still while a server is waited for that is down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

_pausable: ContextVar[asyncio.Timeout | None] = ContextVar("pausable", default=None)
"""The limit of the running task, and of the tasks that it began."""


@contextmanager
def pausable(limit: asyncio.Timeout) -> Iterator[None]:
    """Let `not_counted` pause `limit`, which has been entered."""
    token = _pausable.set(limit)
    try:
        yield
    finally:
        _pausable.reset(token)


@contextmanager
def not_counted() -> Iterator[None]:
    """Pause the time limit around it, if there is one."""
    limit, loop = _pausable.get(), asyncio.get_running_loop()
    end = None if limit is None or limit.expired() else limit.when()
    if limit is None or end is None:
        yield
        return
    left = end - loop.time()
    with suppress(RuntimeError):  # it is over: this task outlived its episode
        limit.reschedule(None)
    try:
        yield
    finally:
        with suppress(RuntimeError):
            limit.reschedule(loop.time() + left)
