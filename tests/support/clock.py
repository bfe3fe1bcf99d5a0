"""The event loop's clock, moved on by hand: long time limits end at once, and only those that the test means."""

from __future__ import annotations

import asyncio


def skip(seconds: float) -> None:
    """Let `seconds` pass on the running event loop's clock."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]
