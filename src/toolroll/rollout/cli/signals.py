"""SIGINT and SIGTERM end a run gracefully: what is running is aborted at the engine and not
recorded, what is finished is kept.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """A signal asked the run to end. `number`: which one."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


async def until_stopped(awaitable: Awaitable[T]) -> T:
    """What `awaitable` gives; at the first signal it is cancelled, and `StoppedError` raised
    when it has ended.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(awaitable)
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:  # a second signal must not cut the clean-up short
            received.append(number)
            task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise StoppedError(received[0]) from None
        task.cancel()
        raise
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
