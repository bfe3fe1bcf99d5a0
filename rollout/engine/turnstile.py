"""`Turnstile`: lets callers through one in each pass of the event loop.

Hundreds of replies can come at once. Were all of them worked on in one pass, the loop would be away until the last was done, and what
the first ones ask next would be written after it too: such a crowd would stay one, since its next replies come at once again.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """First come, first through; who finds nobody before it is through at once. For one event loop at a time."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free = True

    async def enter(self) -> None:
        """Wait for one's turn."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # of the loop before, if there was one, nobody comes back
            self._loop, self._free, self._waiting = loop, True, deque()
        if self._free:
            self._free = False
            loop.call_soon(self._next, loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._free = True
