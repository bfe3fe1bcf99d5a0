"""End a run gracefully at SIGINT or SIGTERM. Running episodes are aborted at the engine and not
recorded, and finished episodes are kept.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """The signal `number` ended the run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


async def until_stopped(awaitable: Awaitable[T]) -> T:
    """Return the result of `awaitable`. At the first SIGINT or SIGTERM, cancel `awaitable`, wait
    until it ends, and raise `StoppedError`.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(awaitable)
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:  # a second signal must not interrupt the clean-up
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
