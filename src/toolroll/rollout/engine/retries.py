"""`Retries`: sends one request until it is answered, or until no other attempt may succeed.

Invariants:

- A failure is sent again only if its `Failure` says that another attempt may succeed. A server
  fault is sent again once.
- The next attempt begins no earlier than the server asks (`Failure.retry_after`), and only if its
  pause ends before the time limit of all attempts.
- The time of an outage does not count against this limit, and the attempt that failed in it does
  not count as an attempt. After `_MAX_OUTAGES` outages that the request may have caused, it fails.
- After `aclose`, no request in flight is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import TypeVar

from toolroll.rollout.engine.errors import Failure
from toolroll.rollout.engine.outage import Outage, Sleep

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_OUTAGES = 3


@dataclass(frozen=True, slots=True)
class Backoff:
    """The number of `retries` after the first attempt, and the pauses before them, in seconds.

    The pause doubles from `first` to `longest`. Of this, a random part between a half and the whole
    is waited. `jitter` returns a number in [0, 1).
    """

    retries: int
    first: float
    longest: float
    jitter: Callable[[], float] = random.random

    def pause(self, attempts: int) -> float:
        """Return the seconds to wait after `attempts` failed attempts."""
        pause = min(self.first * 2.0 ** (attempts - 1), self.longest)
        return pause * (0.5 + self.jitter() / 2)


class Retries:
    """The attempts of all requests to one server, whose outages they wait for together."""

    def __init__(self, outage: Outage, backoff: Backoff, *, sleep: Sleep = asyncio.sleep) -> None:
        self.outage = outage
        self.closings = 0
        """How often the client was closed."""
        self._backoff = backoff
        self._sleep = sleep

    async def send(
        self, attempt: Callable[[float], Awaitable[T | Failure]], *, seconds: float = inf
    ) -> tuple[T | Failure, int]:
        """Call `attempt` until it returns an answer. Return the answer, or the last failure, and
        the number of attempts.

        `attempt` gets the seconds that are left of `seconds`, the time limit of all attempts.
        Raise `EngineUnreachableError` if the server does not answer for the time of its `Outage`.
        """
        closings, ends = self.closings, perf_counter() + seconds
        attempts = server_faults = outages = 0
        while True:
            ended = self.outage.ended
            outcome = await attempt(ends - perf_counter())
            if not isinstance(outcome, Failure):
                self.outage.answered()
                return outcome, attempts + 1
            away = (outcome.lost or outcome.down) and self.closings == closings
            waited_from = perf_counter()
            if away and await self.outage.over(ended, outcome.message, down=outcome.down):
                ends += perf_counter() - waited_from
                outages += outcome.running
                if outages < _MAX_OUTAGES:
                    continue
                why = f"the server went down {outages} times during this request"
                return replace(outcome, message=f"{why}: {outcome.message}"), attempts + 1
            attempts += 1
            if self.closings != closings:
                why = "the client was closed during the request"
                return replace(outcome, message=why), attempts
            server_faults += outcome.server_fault
            again = outcome.retry or (outcome.server_fault and server_faults == 1)
            pause = max(self._backoff.pause(attempts), outcome.retry_after or 0.0)
            if not again or attempts > self._backoff.retries or pause >= ends - perf_counter():
                return outcome, attempts
            logger.info("attempt %d failed (%s), next in %.2f s", attempts, outcome.message, pause)
            await self._sleep(pause)

    async def aclose(self) -> None:
        """Send no request in flight again, and wait no longer for the server."""
        self.closings += 1
        await self.outage.aclose()
