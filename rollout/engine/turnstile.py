"""`Turnstile`: lets callers through a few in each pass of the event loop.

Hundreds of replies can come at once. Were all of them worked on in one pass, the loop would be away until the last was done, and with
it every timer, every other connection and whoever cancels. A few and not one, since each pass costs a look at all connections, and
what several do one after the other is in the processor's caches; and no more, since 256 episodes lose a hundredth at sixteen.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 4


class Turnstile:
    """First come, first through, at most `AT_ONCE` in a pass. For one event loop at a time."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left = AT_ONCE

    async def enter(self) -> None:
        """Wait for one's turn."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # of the loop before, if there was one, nobody comes back
            self._loop, self._left, self._waiting = loop, AT_ONCE, deque()
        if self._left:
            self._pass(loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left -= 1
        if not self._left:
            loop.call_soon(self._open, loop)  # in the next pass

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = AT_ONCE
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._pass(loop)
