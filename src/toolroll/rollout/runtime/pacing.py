"""`Turnstile`: keeps the iterations of an event loop short while many tasks have work to do.

An iteration runs everything that is ready. If a thousand answers arrive during one iteration, the
next one handles them all, and meanwhile no request is sent and no answer is read.
"""

from __future__ import annotations

import asyncio
from collections import deque

_MOST = 16


class Turnstile:
    """Lets at most `most` tasks pass in one iteration of the event loop. The others pass in the
    next iterations, in the order in which they came. It serves one event loop at a time.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def passed(self) -> None:
        """Return at once, or in a later iteration if `most` tasks have passed in this one."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the tasks of an earlier loop are gone
            self._loop, self._left, self._waiting = loop, self._most, deque()
        if self._left == self._most:
            loop.call_soon(self._next, loop)
        if self._left:
            self._left -= 1
            return
        waiting = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin an iteration."""
        self._left = self._most
        while self._left and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():  # it may be cancelled
                waiting.set_result(None)
                self._left -= 1
        if self._left < self._most:
            loop.call_soon(self._next, loop)
