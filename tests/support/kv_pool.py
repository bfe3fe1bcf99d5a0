"""The memory for keys and values of an engine, as SGLang manages it: the cached prefixes and the
tokens of running requests are at most `size` together.
"""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from toolroll.testing.prefix_cache import PrefixCache

_Ids = npt.NDArray[np.int32]


class KvPool:
    """Room for `size` tokens. Prompts are computed in a row, `seconds` for each new token."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size = size
        self.seconds = seconds
        self.cache = PrefixCache()
        self._running: dict[int, _Ids] = {}  # the cached prefixes that running requests use
        self._reserved = 0
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    async def start(self, prompt: _Ids, sampled: int) -> int:
        """Wait for room for `prompt` and `sampled` new tokens, and compute the prompt. Return the
        length of its cached prefix, which stays cached until `end`.
        """
        async with self._line:
            while True:
                cached = len(self.cache.match(prompt)[: len(prompt) - 1])
                new = len(prompt) - cached + sampled
                self._running[id(prompt)] = prompt[:cached]
                if self._used() + new <= self.size or len(self._running) == 1:
                    break
                del self._running[id(prompt)]
                self._freed.clear()
                await self._freed.wait()
            self._reserved += new
            self._evict()
            await asyncio.sleep(self.seconds * (len(prompt) - cached))
        return cached

    def end(self, prompt: _Ids, cached: int, sampled: _Ids) -> None:
        """Free what `start` reserved, and keep the prompt and all but the last sampled token."""
        del self._running[id(prompt)]
        self._reserved -= len(prompt) - cached + len(sampled)
        computed = np.concatenate([prompt, sampled[:-1]])
        self.cache.insert(computed, np.zeros(len(computed), dtype=np.int32))
        self._evict()
        self._freed.set()

    def _used(self) -> int:
        union = PrefixCache()
        for prefix in self._running.values():
            union.insert(prefix, prefix)
        return union.tokens + self._reserved

    def _evict(self) -> None:
        for prefix in self._running.values():  # so they are evicted last
            self.cache.match(prefix)
        self.cache.evict(max(0, self.size - self._reserved))
