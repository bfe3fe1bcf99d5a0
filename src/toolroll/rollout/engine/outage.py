"""`Outage`: waits until a server answers, at the start or after requests failed.

Invariants:

- Only one health check (probe) runs at a time, however many requests are waiting.
- The time of an outage does not count against a request's deadline or an episode's time limit, and
  the failed request does not count as an attempt.
- After `timeout` seconds, all waiting requests fail at once. While the server stays down, each
  later request fails after at most one probe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from time import perf_counter

from toolroll.rollout.engine.errors import without_server
from toolroll.rollout.engine.health import Health
from toolroll.rollout.errors import EngineUnreachableError
from toolroll.rollout.runtime.time_limit import not_counted

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 10.0

Sleep = Callable[[float], Awaitable[None]]


class _State(Enum):
    ANSWERS = "it answers: the failure was the request's own"
    BACK = "it answers again"
    LOST = "it did not answer in time"


class Outage:
    """Waits for `server` ("the engine at http://..."). `probe` checks its health.

    `timeout`: the longest time to wait, in seconds. If it is 0, never wait.
    """

    def __init__(
        self,
        server: str,
        probe: Callable[[], Awaitable[Health]],
        *,
        timeout: float,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.started = False
        """True if the server has ever answered."""
        self.ended = 0
        """The number of outages that have ended, with an answer or a timeout. If this number has
        changed since a failed request was sent, the outage that made the request fail is over.
        """
        self._server = server
        self._probe = probe
        self._timeout = timeout
        self._sleep = sleep
        self._waited = 0.0
        self._state = _State.ANSWERS
        self._probing: asyncio.Task[_State] | None = None

    def answered(self) -> None:
        """Record that a request was answered, which ends an outage."""
        self.started = True
        if self._waited:
            logger.warning("%s answers again", self._server)
            self._waited = 0.0

    async def over(self, ended: int, why: str, *, down: bool = False) -> bool:
        """Wait until the outage ends. Return True if the server answers again.

        Return False if there is no outage (the server answers the first probe), if `timeout` is 0,
        or if `aclose` is called. Raise `EngineUnreachableError` if the server does not answer in
        time.

        Args:
            ended: The value of `self.ended` when the failed request was sent.
            why: The reason why the request failed.
            down: True if the failure itself shows that the server is down.
        """
        if not self._timeout:
            return False
        state = self._state
        if self.ended == ended:
            if self._probing is None or self._probing.done():
                watch = self._watch(without_server(why), down=down)
                self._probing = asyncio.get_running_loop().create_task(watch)
            probing = self._probing
            with not_counted():
                await asyncio.wait([probing])
            if probing.cancelled():
                return False
            state = probing.result()
        if state is _State.LOST:
            raise EngineUnreachableError(
                f"{self._server} has not answered for {self._timeout:g} s: {without_server(why)}"
            )
        return state is _State.BACK

    async def wait_until_healthy(self) -> Health:
        """Wait until the server is healthy. Return the last health check, which is not ok if the
        server answers wrongly, or if `timeout` is 0. Raise `EngineUnreachableError` if the server
        does not answer in time.
        """
        health = await self._probe()
        while health.down and await self.over(self.ended, health.why, down=True):
            health = await self._probe()
        if health.ok:
            self.answered()
        return health

    async def aclose(self) -> None:
        """Stop waiting. `over` returns False to all waiting requests."""
        if self._probing is not None and not self._probing.done():
            self._probing.cancel()
            await asyncio.wait([self._probing])

    async def _watch(self, why: str, *, down: bool) -> _State:
        if not down and not (await self._probe()).down:
            return _State.ANSWERS
        if not self._waited:
            logger.warning(
                "%s does not answer (%s): waiting for it, up to %g s",
                self._server,
                why,
                self._timeout,
            )
        while self._waited < self._timeout:
            # The pause keeps growing until a request is answered, because a router may answer the
            # probe without having a worker.
            pause = min(
                max(_FIRST_PAUSE, self._waited), _LONGEST_PAUSE, self._timeout - self._waited
            )
            await self._sleep(pause)
            began = perf_counter()
            health = await self._probe()
            self._waited += pause + perf_counter() - began
            if not health.down:
                return self._end(_State.BACK)
        return self._end(_State.LOST)

    def _end(self, state: _State) -> _State:
        self.ended += 1
        self._state = state
        return state
