"""`KvPool`: the memory for keys and values of the embedded engine, as SGLang manages it.

Invariants: the cached prefixes and the tokens of running requests are at most `size` together.
Requests get room in the order of their arrival.
"""

from __future__ import annotations

import asyncio
from math import inf

import numpy as np
import numpy.typing as npt

from toolroll.rollout.testing.generation import Generation
from toolroll.rollout.testing.prefix_cache import PrefixCache

_Ids = npt.NDArray[np.int32]


class KvPool:
    """Room for `size` tokens. The prompts are computed one after the other, with `seconds` for each
    token that is not cached.
    """

    def __init__(self, size: int | None = None, seconds: float = 0.0) -> None:
        self.size = inf if size is None else size
        self.cache = PrefixCache()
        self.computed = 0
        """The number of prompt tokens that were computed."""
        self.running = 0
        self.seconds = seconds
        self._reserved = 0
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def used(self) -> int:
        """The number of tokens that running requests use."""
        return self.cache.locked + self._reserved

    async def start(
        self, generation: Generation, prompt: _Ids, most_cached: int, sampled: int
    ) -> _Ids:
        """Wait for room for `prompt` and `sampled` new tokens, and compute the prompt. Return the
        passes of its cached prefix, at most `most_cached` tokens.

        The prefix is locked until `end`. Raise `GenerationAborted` if the request is aborted.
        """
        async with self._line:
            while True:
                cached = self.cache.match(prompt)[:most_cached]
                new = len(prompt) - len(cached) + sampled
                self.cache.lock(prompt[: len(cached)], 1)
                if self.used + new <= self.size or not self.running:
                    break
                self.cache.lock(prompt[: len(cached)], -1)
                self._freed.clear()
                await generation.race(self._freed.wait())
            self._reserved += new
            self.running += 1
            self.cache.evict(self.size - self._reserved)
            self.computed += len(prompt) - len(cached)
            if seconds := self.seconds * (len(prompt) - len(cached)):
                try:
                    await generation.race(asyncio.sleep(seconds))
                except BaseException:
                    self.end(prompt, len(cached), sampled)
                    raise
        return cached

    def insert(self, ids: _Ids, passes: _Ids) -> None:
        """Add a computed sequence to the cache (`PrefixCache.insert`)."""
        self.cache.insert(ids, passes)
        self.cache.evict(self.size - self._reserved)

    def end(self, prompt: _Ids, cached: int, sampled: int) -> None:
        """Free what `start` reserved for a request, whose prompt had `cached` cached tokens."""
        self.cache.lock(prompt[:cached], -1)
        self._reserved -= len(prompt) - cached + sampled
        self.running -= 1
        self._freed.set()
