"""`Admission`: holds episodes back between turns while more are in flight than the KV cache holds.
Otherwise the engine evicts the prefix of each one before its next turn, and computes it again.

Invariants:

- Only an admitted episode samples. It stays admitted between its turns. If the admitted episodes
  grow beyond the cache, those that are idle for the longest time are dismissed, because the engine
  evicts them first. An episode that parks is dismissed too, so that the waiting ones can park.
- An episode is admitted if it fits into the cache with the others. A prefix that their first
  prompts share is counted once.
- The others wait in the order of their first turns. So a next turn goes before a new episode, and
  an episode waits at most for turns of earlier episodes and of admitted ones. After its first turn,
  it waits at most `LONGEST` seconds. If the trainer stops, it waits no longer.
- If the engine has nothing to compute, and the tool of an admitted episode is slow, a waiting one
  takes its place.
- While the engine's load is not known, none waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any, NamedTuple

from toolroll.rollout.engine.engine_client import EngineClient
from toolroll.rollout.engine.resume import PARKING
from toolroll.rollout.engine.stream import Progress
from toolroll.rollout.runtime.time_limit import not_counted
from toolroll.rollout.types import Completion, GenerateRequest, IdArray

logger = logging.getLogger(__name__)

# The figures are of `Work` in tests/unit/engine/test_admission.py: its episodes in flight need four
# times the cache. Without admission, it takes 500 s, and 3.9 million tokens are computed again.

LONGEST = 600.0
"""Far above the wait for a place (the whole work takes 208 s): a limit for the case that an episode
that never ends has one.
"""
_FILL = 0.9
"""The share of the cache that the admitted episodes may fill. The rest is for tokens that are being
sampled, which are not counted yet. With 0.8, the work takes 206 s and computes 0.59 million tokens
again; with 0.9, 208 s and 0.67; with 0.95, 222 s and 0.91; with 1, 238 s and 1.12.
"""
_BLOCK = 128
"""Shared prefixes are compared in blocks of this many tokens. Any size from 16 to 512 gives the
same result; one above 1,024 would not see the shared system prompt.
"""
_LOOK_AGAIN = 1.0
"""Seconds between two looks at whether the trainer has stopped, which nothing signals."""
_ASK_AGAIN, _STALE = 10.0, 60.0
"""After so many seconds, the engine is asked again for its load; an older load is not used. The
cache's size is fixed and the speed changes slowly: with 1 or 60 s between two questions, the work
takes 220 or 218 s. A load is stale after six questions without an answer.
"""
_SLOW = 0.5
"""A tool is slow if the engine could compute this share of a full cache in the meantime: half of
it, because a place that changes hands has two prefixes computed again. With tools of 5 s, 0.25
takes 383 s and computes 2.0 million tokens again; 0.5, 413 s and 1.8; 1, 464 s and 1.3; without
admission, 496 s and 3.7.
"""
_SECONDS = 1e-4
"""The assumed seconds for one prompt token, until the engine has computed a prompt: the order of
magnitude of a model of some billion parameters on one GPU. It is used until the next question.
"""


@dataclass(eq=False, slots=True)
class _Episode:
    """`number`: the position in the order of first turns. `tokens`: the length of the last prompt
    with its answer. `blocks`: the blocks of the first prompt.
    """

    number: int
    blocks: tuple[int, ...]
    tokens: int = 0
    requests: int = 0
    turns: int = 0
    held: int = 0
    admitted: bool = False
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class Load(NamedTuple):
    """What SGLang's `/v1/loads` says: the size of the KV cache in tokens, and the seconds in which
    the engine computes one prompt token.
    """

    size: int
    seconds: float


class Admission:
    """Decides which of the episodes on `engine` may sample.

    `share`: the share of the engine's cache that they may fill. If it is 0, none waits.
    """

    def __init__(self, engine: EngineClient, share: float = 1.0) -> None:
        self.held_turns = 0
        """The number of turns that had to wait."""
        self._engine = engine
        self._share = share
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._numbers = count()
        self._forget()

    def _forget(self) -> None:
        """Forget the engine's load and all episodes."""
        self._load: Load | None = None
        self._answered = self._asked = -inf
        self._episodes: dict[str, _Episode] = {}
        self._own = 0  # the tokens of the admitted episodes outside their blocks
        self._blocks: Counter[int] = Counter()
        self._idle: dict[_Episode, float] = {}  # admitted; the engine evicts the first one first
        self._queue: dict[int, _Episode] = {}  # those that wait, by number
        self._timer: asyncio.TimerHandle | None = None
        self._busy_until = -inf  # the engine computes the prompts that it has until then

    @property
    def held(self) -> int:
        """The number of episodes that wait now."""
        return len(self._queue)

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Wait until the episode `request.session_id` may sample. Return the completion."""
        if not self._share:
            return await self._engine.generate(request, progress=progress)
        self._enter_loop()
        await self._ask_if_due()
        name, prompt = request.session_id, request.input_ids
        episode = self._episodes.get(name)
        if episode is None:
            episode = self._episodes[name] = _Episode(next(self._numbers), _blocks_of(prompt))
        new = max(0, len(prompt) - (episode.tokens if episode.admitted else 0))
        self._set_tokens(episode, len(prompt))
        self._idle.pop(episode, None)
        episode.requests += 1
        parks = False
        try:
            if episode.admitted:
                self._compute(new)
            elif not self._engine.stopped():
                await self._wait(episode)
            self._make_room()
            end = self._busy_until
            try:
                completion = await self._engine.generate(request, progress=progress)
            except BaseException:
                self._take_back(new, end)
                raise
            self._compute(len(prompt) - completion.cached_tokens - new)
            self._set_tokens(episode, len(prompt) + len(completion.output_ids))
            parks = completion.finish_reason == "abort" and PARKING.get() is not None
            return completion
        finally:
            episode.requests -= 1
            episode.turns += 1
            if not episode.requests:
                if parks or self._episodes.get(name) is not episode:  # it parks or has ended
                    self._dismiss(episode)
                elif episode.admitted:
                    self._idle[episode] = asyncio.get_running_loop().time()
            self._make_room()
            self._admit_waiting()

    def end(self, session_id: str) -> int:
        """Forget an episode that has ended. Return how many of its turns had to wait."""
        episode = self._episodes.pop(session_id, None)
        if episode is None:
            return 0
        self._dismiss(episode)
        if self._queue:  # otherwise no event loop need run
            self._admit_waiting()
        return episode.held

    def stopped(self) -> bool:
        """Return True while the trainer lets the running episode start no turn."""
        return self._engine.stopped()

    def _enter_loop(self) -> None:
        """Forget the episodes of the last turn's event loop if it is closed: none goes on."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_closed():
            self._forget()
        self._loop, self._lock = loop, asyncio.Lock()

    # --- who is admitted --------------------------------------------------------------------------

    async def _wait(self, episode: _Episode) -> None:
        self._queue[episode.number] = episode
        admitted = asyncio.get_running_loop().create_future()
        episode.waiting.append(admitted)
        self._admit_waiting()
        if admitted.done():
            return
        if not self.held_turns:
            message = "the KV cache of %s does not hold all episodes: some wait between turns"
            logger.warning(message, self._engine.url)
        self.held_turns += 1
        episode.held += 1
        try:
            with not_counted(), suppress(TimeoutError):
                async with asyncio.timeout(LONGEST if episode.turns else None):
                    while not admitted.done() and not self._engine.stopped():
                        await asyncio.wait([admitted], timeout=_LOOK_AGAIN)
                        await self._ask_if_due()  # no other turn may start
        finally:
            if admitted in episode.waiting:
                episode.waiting.remove(admitted)
        if not self._engine.stopped():
            self._admit(episode)

    def _admit_waiting(self) -> None:
        """Admit the first waiting episodes, as many as fit."""
        loop = asyncio.get_running_loop()
        while self._queue:
            episode = self._queue[min(self._queue)]
            if episode.waiting:
                if not self._fits(episode) and loop.time() < self._spare_from():
                    break
                self._admit(episode)
                self._compute(episode.tokens)
            del self._queue[episode.number]
        if self._timer is not None:
            self._timer.cancel()
        if self._queue and (spare_from := self._spare_from()) < inf:
            self._timer = loop.call_at(spare_from, self._admit_waiting)

    def _spare_from(self) -> float:
        """Return the time at which a waiting episode takes the place of an idle one."""
        if not self._idle or self._load is None:
            return inf
        slow = _SLOW * self._limit * self._load.seconds
        return max(self._busy_until, next(iter(self._idle.values())) + slow)

    def _compute(self, tokens: int) -> None:
        """Count `tokens` prompt tokens that the engine computes now."""
        if self._load is not None:
            now = asyncio.get_running_loop().time()
            self._busy_until = max(now, self._busy_until) + tokens * self._load.seconds

    def _take_back(self, tokens: int, end: float) -> None:
        """Take back what the engine has not computed of `tokens`, which it computes until `end`."""
        if self._load is not None:
            remaining = max(0.0, end - asyncio.get_running_loop().time()) / self._load.seconds
            self._compute(-min(tokens, int(remaining)))

    def _fits(self, episode: _Episode) -> bool:
        blocks = len(self._blocks) + sum(block not in self._blocks for block in episode.blocks)
        alone = not self._own and not self._blocks
        return alone or self._own + _own_of(episode) + _BLOCK * blocks <= self._limit

    @property
    def _limit(self) -> float:
        return inf if self._load is None else self._load.size * self._share * _FILL

    def _make_room(self) -> None:
        """Dismiss idle episodes while the admitted ones do not fit: first the one that the engine
        evicts first.
        """
        while self._idle and self._own + _BLOCK * len(self._blocks) > self._limit:
            self._dismiss(next(iter(self._idle)))

    def _admit(self, episode: _Episode) -> None:
        if not episode.admitted:
            episode.admitted = True
            self._own += _own_of(episode)
            self._blocks.update(episode.blocks)
        for future in episode.waiting:
            if not future.done():
                future.set_result(None)
        episode.waiting.clear()

    def _dismiss(self, episode: _Episode) -> None:
        self._idle.pop(episode, None)
        if episode.admitted:
            episode.admitted = False
            self._own -= _own_of(episode)
            for block in episode.blocks:
                self._blocks[block] -= 1
                if not self._blocks[block]:
                    del self._blocks[block]

    def _set_tokens(self, episode: _Episode, tokens: int) -> None:
        tokens = max(tokens, _BLOCK * len(episode.blocks))  # a later prompt may be shorter
        if episode.admitted:
            self._own += tokens - episode.tokens
        episode.tokens = tokens

    # --- the engine's load ------------------------------------------------------------------------

    async def _ask_if_due(self) -> None:
        """Ask the engine for its load if the last answer is old. Only at the first time, the other
        turns wait for the answer.
        """
        loop = asyncio.get_running_loop()
        if self._load is not None and loop.time() >= self._answered + _STALE:
            self._load, self._busy_until = None, -inf
            self._admit_waiting()
        if self._lock.locked() and self._asked > -inf:
            return
        if loop.time() >= self._asked + _ASK_AGAIN:
            with not_counted():  # a worker that does not answer takes as long as its time limit
                async with self._lock:
                    if loop.time() >= self._asked + _ASK_AGAIN:
                        await self._ask(loop)

    async def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loads = await asyncio.gather(*map(self._load_of, await self._engine.workers()))
        finally:
            self._asked = loop.time()
        answered = [load for load in loads if load is not None]
        if answered and len(answered) == len(loads):
            self._answered = self._asked
            seconds = max(load.seconds for load in answered) / len(answered) / self._share
            if self._load is not None:
                remaining = max(0.0, self._busy_until - self._asked)
                self._busy_until = self._asked + remaining * seconds / self._load.seconds
            self._load = Load(sum(load.size for load in answered), seconds)
            self._admit_waiting()

    async def _load_of(self, worker: str) -> Load | None:
        loads = await self._engine.get(f"{worker}/v1/loads?include=core")
        if loads is None:
            return None
        info = await self._engine.get(f"{worker}/server_info")
        return read_load(loads, info if isinstance(info, dict) else {})


def read_load(loads: Any, server_info: Mapping[str, Any]) -> Load | None:
    """Return the load in SGLang's `/v1/loads` and `/server_info`, or None if it is not there."""
    try:
        ranks = list(loads["loads"])
        size = sum(int(rank["max_total_num_tokens"]) for rank in ranks)
        computed = sum(int(rank["total_prefill_uncached_tokens"]) for rank in ranks)
        busy = sum(int(rank["total_prefill_busy_us"]) for rank in ranks) / 1e6
        if server_info.get("enable_hierarchical_cache"):  # evicted prefixes move to the host
            size = int(size * max(1.0, float(server_info["hicache_ratio"])))
    except (TypeError, ValueError, LookupError, OverflowError):
        return None
    seconds = busy / computed if computed > 0 and busy > 0 else _SECONDS
    return Load(size, seconds / len(ranks)) if size > 0 else None


def _own_of(episode: _Episode) -> int:
    """Return the number of tokens outside the episode's blocks."""
    return episode.tokens - _BLOCK * len(episode.blocks)


def _blocks_of(prompt: IdArray) -> tuple[int, ...]:
    """Return a number for each full block of `prompt`, which depends on all ids up to its end."""
    blocks = [0]
    for stop in range(_BLOCK, len(prompt) + 1, _BLOCK):
        blocks.append(hash((blocks[-1], prompt[stop - _BLOCK : stop].tobytes())))
    return tuple(blocks[1:])
