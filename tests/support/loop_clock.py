"""A manual clock for the event loop: time limits end only when the test advances it."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
_MOST_SKIPS = 2000


def skip(seconds: float) -> None:
    """Let `seconds` pass on the running event loop's clock."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]


async def skip_until(done: Awaitable[T], *, seconds: float) -> T:
    """Let `seconds` pass again and again until `done`."""
    loop = asyncio.get_running_loop()
    waiting, time, ahead = asyncio.ensure_future(done), loop.time, 0.0
    loop.time = lambda: time() + ahead  # type: ignore[method-assign]
    for _ in range(_MOST_SKIPS):
        if waiting.done():
            return waiting.result()
        ahead += seconds
        await asyncio.sleep(0)
    waiting.cancel()
    raise AssertionError(f"what is waited for is not done after {ahead:g} s")
