"""`Generation`: the progress of one answer. This is the number of sampled tokens, their weight
versions, and the state (held or aborted).

Invariants: an answer without latency is complete at once, without a timer or a task. After `abort`
nothing changes, and `sampled()` returns the final number of tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class GenerationAborted(Exception):
    """The request was aborted while it was waiting."""


class Generation:
    """The progress of one answer. Times are in seconds on the event loop's clock."""

    def __init__(self) -> None:
        self.started = False
        self.aborted = False
        self._stopped = asyncio.Event()
        self._wake = asyncio.Event()
        self._versions: list[tuple[str, int]] = []
        self._latency = self._per_token = 0.0
        self._length = self._reached = 0
        self._since = 0.0
        self._held_at: int | None = None

    # --- time -------------------------------------------------------------------------------------

    def begin(self, length: int, latency: float, per_token: float) -> None:
        """Start sampling `length` tokens. After `latency`, sample one token every `per_token`
        seconds. If `per_token` is 0, sample all tokens within `latency`, at even intervals.
        """
        self._length, self._latency, self._per_token = length, latency, per_token
        self._since = _now()

    async def advance(self, tokens: int) -> None:
        """Wait until `tokens` tokens are sampled. Raise `GenerationAborted` if the request is
        aborted before that.
        """
        target = self._due(tokens)
        while not self.aborted:
            self._wake.clear()
            remaining = target - (_now() - self._since)
            if remaining <= 0:
                self._reached = max(self._reached, tokens)
                return
            try:
                async with asyncio.timeout(remaining):
                    await self._wake.wait()
            except TimeoutError:
                continue
        raise GenerationAborted

    def reach(self, tokens: int) -> None:
        """Set the number of sampled tokens directly, instead of by the clock."""
        self._length = self._reached = tokens
        self._wake.set()

    async def race(self, awaitable: Awaitable[_T]) -> _T:
        """Return the result of `awaitable`. Raise `GenerationAborted` if aborted first."""
        task: asyncio.Future[Any] = asyncio.ensure_future(awaitable)
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                result: _T = task.result()
                return result
            raise GenerationAborted
        finally:
            task.cancel()
            stopped.cancel()

    def sampled(self) -> int:
        """Return the number of tokens sampled so far."""
        if self.aborted:
            return self._reached
        spent = _now() - self._since
        if self._per_token > 0:
            by_time = int((spent - self._latency) / self._per_token)
        else:
            by_time = int(self._length * spent / self._latency) if self._latency > 0 else 0
        limit = self._length if self._held_at is None else self._held_at
        return min(limit, max(self._reached, by_time))

    async def hold_at(self, tokens: int) -> None:
        """Wait until `tokens` tokens are sampled. From then on, no more tokens are sampled until
        `release` is called.

        Raise `GenerationAborted` if the request is aborted while this waits.
        """
        await self.advance(tokens)
        self._held_at = tokens

    def release(self) -> None:
        """Continue after `hold_at`."""
        self._held_at = None

    def _due(self, tokens: int) -> float:
        if self._per_token > 0:
            return self._latency + tokens * self._per_token
        return self._latency * tokens / self._length if self._length else self._latency

    # --- events -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make `wait_until` check its condition again."""
        self._wake.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is True. The condition is checked again after each `wake` and
        `reach`.

        Raise `GenerationAborted` if the request is aborted before that.
        """
        while not condition():
            if self.aborted:
                raise GenerationAborted
            self._wake.clear()
            await self._wake.wait()

    def abort(self) -> None:
        """Stop sampling at once, for good."""
        if not self.aborted:
            self._reached = self.sampled()
            self.aborted = True
            self._stopped.set()
            self._wake.set()

    # --- weights ----------------------------------------------------------------------------------

    def switch(self, version: str) -> None:
        """Set the weight version of all tokens that are sampled from now on."""
        self._versions.append((version, self.sampled()))

    def spans(self, length: int) -> list[dict[str, Any]]:
        """Return SGLang's `weight_versions` for the first `length` tokens: one dict with
        `version`, `start` and `end` for each run of tokens with the same version.
        """
        ends = [start for _, start in self._versions[1:]] + [length]
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
