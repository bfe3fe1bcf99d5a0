"""`Run`: one answer in time: how many of its tokens are sampled by now, under which weights,
paused, held or aborted.

Invariants: an answer without latency needs no clock and no task; a paused run makes no progress;
after `abort` nothing advances, and `sampled()` says how far it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

_T = TypeVar("_T")


class RunAborted(Exception):
    """The request was aborted while it was waiting."""


class Run:
    """Times are of the event loop's clock, in seconds."""

    def __init__(self) -> None:
        self.started = False
        self.aborted = False
        self.retractions = 0
        self._abort_sent = False
        self._stopped = asyncio.Event()
        self._wake = asyncio.Event()
        self._versions: list[tuple[str, int]] = []
        self._latency = self._per_token = 0.0
        self._length = self._reached = 0
        self._elapsed = 0.0
        self._since: float | None = None
        self._paused = False
        self._stands_at: int | None = None

    # --- time -------------------------------------------------------------------------------------

    def begin(self, length: int, latency: float, per_token: float) -> None:
        """From now on `length` tokens are sampled: after `latency`, one each `per_token`; where
        that is 0, evenly within it.
        """
        self._length, self._latency, self._per_token = length, latency, per_token
        self._elapsed = 0.0
        self._since = None if self._paused else _now()

    async def advance(self, tokens: int) -> None:
        """Wait until that many tokens are sampled; raises `RunAborted`."""
        target = self._due(tokens)
        while not self.aborted:
            self._wake.clear()
            left = None if self._paused else target - self._spent()
            if left is not None and left <= 0:
                self._reached = max(self._reached, tokens)
                return
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                continue
        raise RunAborted

    async def race(self, awaitable: Awaitable[_T]) -> _T:
        """What `awaitable` gives; raises `RunAborted` where an abort is faster."""
        task: asyncio.Future[Any] = asyncio.ensure_future(awaitable)
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                result: _T = task.result()
                return result
            raise RunAborted
        finally:
            task.cancel()
            stopped.cancel()

    def sampled(self) -> int:
        """The tokens that are sampled by now."""
        spent = self._spent()
        if self._per_token > 0:
            by_time = int((spent - self._latency) / self._per_token)
        else:
            by_time = int(self._length * spent / self._latency) if self._latency > 0 else 0
        limit = self._length if self._stands_at is None else self._stands_at
        return min(limit, max(self._reached, by_time))

    async def stand_at(self, tokens: int) -> None:
        """Wait until `tokens` are sampled, and stay there until `go_on`, whatever the clock
        says; raises `RunAborted`.
        """
        await self.advance(tokens)
        self._stands_at = tokens

    def go_on(self) -> None:
        """Leave the place of `stand_at`."""
        self._stands_at = None

    def _due(self, tokens: int) -> float:
        if self._per_token > 0:
            return self._latency + tokens * self._per_token
        return self._latency * tokens / self._length if self._length else self._latency

    def _spent(self) -> float:
        return self._elapsed + (_now() - self._since if self._since is not None else 0.0)

    # --- what happens to it -----------------------------------------------------------------------

    def wake(self) -> None:
        """It may start."""
        self._wake.set()

    async def wait_for_start(self) -> None:
        """Wait in the queue; raises `RunAborted`."""
        while not self.started:
            if self.aborted:
                raise RunAborted
            self._wake.clear()
            await self._wake.wait()

    def abort(self) -> None:
        """End it here."""
        if not self.aborted:
            self._freeze()
            self.aborted = True
            self._stopped.set()
            self._wake.set()

    def ask_abort(self, *, paused: bool) -> None:
        """What `/abort_request` does. SGLang loses an abort for a request that a pause holds,
        and all later ones for it.
        """
        if self._abort_sent:
            return
        self._abort_sent = True
        if not paused:
            self.abort()

    def pause(self) -> None:
        """No progress until `resume`."""
        self._freeze()
        self._paused = True
        self._wake.set()

    def resume(self) -> None:
        """Go on."""
        if self._paused:
            self._paused = False
            self._since = _now()
            self._wake.set()

    def _freeze(self) -> None:
        self._reached = self.sampled()
        self._elapsed = self._spent()
        self._since = None

    # --- weights ----------------------------------------------------------------------------------

    def switch(self, version: str) -> None:
        """From this token on, `version` samples."""
        self._versions.append((version, self.sampled()))

    def spans(self, length: int) -> list[dict[str, Any]]:
        """SGLang's `weight_versions` over `length` tokens."""
        ends = [at for _, at in self._versions[1:]] + [length]
        spans: list[dict[str, Any]] = []
        for (version, start), end in zip(self._versions, ends, strict=True):
            start, end = min(start, length), min(end, length)
            if start == end:
                continue
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = end
            else:
                spans.append({"version": version, "start": start, "end": end})
        return spans


def _now() -> float:
    return asyncio.get_running_loop().time()
