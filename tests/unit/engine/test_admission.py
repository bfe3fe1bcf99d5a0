"""`Admission`: more episodes in flight than the KV cache holds. The clock is virtual."""

import asyncio
import functools
import random
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from toolroll.rollout.engine import admission, generate_resumed
from toolroll.rollout.engine.admission import Admission, Load, read_load
from toolroll.rollout.runtime.time_limit import pausable
from toolroll.rollout.types import Completion, GenerateRequest, IdArray
from toolroll.testing.prefix_cache import PrefixCache
from toolroll.trainers.parking import ParkableEpisode


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while all tasks wait, and then at once."""

    def __init__(self) -> None:
        selector = selectors.SelectSelector()
        super().__init__(selector)
        self.now = 0.0
        select = selector.select

        def skip(timeout: float | None = None) -> Any:
            ready = select(0)
            self.now += 0.0 if ready else timeout or 0.0
            return ready

        selector.select = skip  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now


def in_virtual_time(main: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Run `main` on a `VirtualLoop`."""

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main(*args, **kwargs))

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


ONE = np.array([1], dtype=np.int32)


class KvPool:
    """An engine's memory for keys and values, as SGLang manages it: the cached prefixes and the
    tokens of running requests are at most `size` together. Prompts are computed in a row, `seconds`
    for each new token.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self.size = size
        self.seconds = seconds
        self.cache = PrefixCache()
        self._running: dict[int, IdArray] = {}  # the cached prefixes that running requests use
        self._reserved = 0
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    async def start(self, prompt: IdArray, sampled: int) -> int:
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

    def end(self, prompt: IdArray, cached: int, sampled: IdArray) -> None:
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


@dataclass
class Pooled:
    """An engine with the embedded engine's KV pool. A request says in `extra` what is sampled
    (`out`), and how many seconds it takes before it starts. `twice`: the tokens computed twice.
    """

    size: int
    seconds: float = 1e-4
    per_token: float = 0.015
    loads: bool = True
    url: str = "pooled"
    twice: int = 0
    asked: int = 0
    order: list[str] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = KvPool(self.size, self.seconds)

    def stopped(self) -> bool:
        return False

    async def workers(self) -> list[str]:
        return ["worker"]

    async def get(self, url: str) -> Any:
        self.asked += 1
        if not self.loads or "/v1/loads" not in url:
            return None
        return {"loads": [rank(self.size, 1000, 1000 * self.seconds)]}

    async def generate(self, request: GenerateRequest, *, progress: Any = None) -> Completion:
        name, prompt, out = request.session_id, request.input_ids, request.extra.get("out", ONE)
        self.order.append(name)
        await asyncio.sleep(request.extra.get("seconds", 0.0))
        cached = await self.pool.start(prompt, len(out))
        self.twice += max(0, self.ends.get(name, 0) - 1 - cached)
        await asyncio.sleep(self.per_token * len(out))
        self.pool.end(prompt, cached, out)
        self.ends[name] = len(prompt) + len(out)
        return Completion(out, None, "stop", cached_tokens=cached)


@dataclass(frozen=True)
class Work:
    """`at_once` of `episodes` with a shared system prompt, in groups of 4 with one first prompt."""

    at_once: int = 32
    episodes: int = 96
    turns: int = 8
    system: int = 1024
    first: int = 4096
    step: int = 1200
    sampled: int = 64
    tool: float = 0.2

    async def play(self, engine: Pooled, waiting: Admission) -> float:
        """Return the time that it took."""
        todo = iter(range(self.episodes))

        async def worker() -> None:
            for number in todo:
                await self._episode(waiting, number)

        await asyncio.gather(*(worker() for _ in range(self.at_once)))
        return now()

    async def _episode(self, waiting: Admission, number: int) -> None:
        group, own = np.random.default_rng(number // 4), np.random.default_rng(1000 + number)
        tools = random.Random(number)
        prompt = np.concatenate([np.arange(self.system), _ids(group, self.first - self.system)])
        name = f"episode {number}"
        for _ in range(tools.randint(self.turns // 2, self.turns * 3 // 2)):
            out = _ids(own, self.sampled)
            await waiting.generate(
                GenerateRequest(prompt.astype(np.int32), {}, name, extra={"out": out})
            )
            await asyncio.sleep(tools.expovariate(1 / self.tool))
            prompt = np.concatenate([prompt, out, _ids(own, self.step)])
        waiting.end(name)


def _ids(source: np.random.Generator, count: int) -> IdArray:
    return source.integers(5000, 50_000, count).astype(np.int32)


@in_virtual_time
async def played(work: Work, size: int, share: float) -> tuple[float, Pooled, Admission]:
    """Return the time that `work` took, its engine and its `Admission`."""
    engine, waiting = admitting(size, share)
    return await work.play(engine, waiting), engine, waiting


def admitting(size: int, share: float = 1.0, **engine: Any) -> tuple[Pooled, Admission]:
    pooled = Pooled(size, **engine)
    return pooled, Admission(pooled, share)  # type: ignore[arg-type]


IN_FLIGHT = 32 * 9000
"""About the tokens of all episodes of `Work` that are in flight at once."""


def test_over_subscription_costs_neither_tokens_nor_throughput() -> None:
    """Below saturation, nothing is held."""
    plain, engine, _ = played(Work(), IN_FLIGHT // 4, 0.0)
    held, admitted, waiting = played(Work(), IN_FLIGHT // 4, 1.0)
    assert engine.twice >= 3 * admitted.twice
    assert plain >= 2 * held
    assert waiting.held_turns and not waiting.held
    plain, _, _ = played(Work(), 2 * IN_FLIGHT, 0.0)
    held, engine, waiting = played(Work(), 2 * IN_FLIGHT, 1.0)
    assert (held, engine.twice, waiting.held_turns) == (plain, 0, 0)


def test_slow_tools_do_not_leave_the_engine_idle() -> None:
    """Without slow tools giving up their place, this takes 2.5 times as long as plain."""
    work = Work(at_once=16, episodes=32, tool=60.0)
    plain, _, _ = played(work, IN_FLIGHT // 8, 0.0)
    held, _, _ = played(work, IN_FLIGHT // 8, 1.0)
    assert held <= 1.15 * plain


@pytest.mark.parametrize("answers", [False, True])
@in_virtual_time
async def test_without_signals_all_are_let_through(answers: bool) -> None:
    """No answer, or none for a minute."""
    engine, waiting = admitting(4000, loads=answers)
    playing = asyncio.gather(*(turn(waiting, name, 3000) for name in "abc"))
    if answers:
        await asyncio.sleep(0.001)
        assert engine.order == ["a"] and waiting.held == 2
        engine.loads = False
        await asyncio.sleep(61)
        await turn(waiting, "a", 3000)
    await playing
    assert waiting.held == 0


async def turn(waiting: Admission, name: str, tokens: int, seconds: float = 0.0) -> None:
    """One turn of an episode whose tokens no other has; `seconds`: how long it takes at least."""
    ids = np.random.default_rng(sum(name.encode())).integers(5000, 50_000, tokens)
    extra = {"seconds": seconds}
    await waiting.generate(GenerateRequest(ids.astype(np.int32), {}, name, extra=extra))


@in_virtual_time
async def test_they_go_on_in_the_order_of_their_first_turns() -> None:
    """A next turn goes before a new episode, also if it is larger; nobody is passed."""
    engine, waiting = admitting(10_000)
    await turn(waiting, "old", 2000)
    await turn(waiting, "large", 6000)
    long = asyncio.create_task(turn(waiting, "long", 8000, seconds=5))
    await asyncio.sleep(1)  # "old" and "large" were idle for too long
    rest = [("new", 3000), ("newer", 100), ("large", 6400), ("old", 2500)]
    others = [asyncio.create_task(turn(waiting, *each)) for each in rest]
    await asyncio.sleep(1)
    assert waiting.held == 4
    await asyncio.gather(long, *others)
    assert engine.order == ["old", "large", "long", "old", "large", "new", "newer"]


@in_virtual_time
async def test_after_its_first_turn_an_episode_waits_only_so_long() -> None:
    engine, waiting = admitting(4000)
    await turn(waiting, "begun", 2000)
    endless = asyncio.create_task(turn(waiting, "endless", 3500, seconds=10_000))
    await asyncio.sleep(1)
    new = asyncio.create_task(turn(waiting, "new", 2000))
    await asyncio.sleep(0)
    start = now()
    await turn(waiting, "begun", 2100)
    assert admission.LONGEST <= now() - start < admission.LONGEST + 1
    assert engine.order == ["begun", "endless", "begun"]
    for task in (endless, new):
        task.cancel()
    await asyncio.gather(endless, new, return_exceptions=True)


@pytest.mark.parametrize("later", [0, 61])
@in_virtual_time
async def test_an_engine_that_seems_slow_holds_until_asked_again(later: int) -> None:
    """Its first prompt loads kernels. After a minute, its load is unknown."""
    engine, waiting = admitting(4000)
    engine.seconds = 0.3
    await turn(waiting, "idle", 3000)
    engine.seconds = 1e-4
    await asyncio.sleep(later)
    start = now()
    await turn(waiting, "new", 3000)
    assert now() - start < admission._ASK_AGAIN + 2


@in_virtual_time
async def test_a_cancelled_request_gives_its_tokens_back() -> None:
    _, waiting = admitting(4000, seconds=0.01)
    cancelled = asyncio.create_task(turn(waiting, "cancelled", 3000, seconds=60))
    await asyncio.sleep(1)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert waiting._busy_until <= now()


@in_virtual_time
async def test_a_shared_prefix_is_counted_once() -> None:
    """A shorter prompt hides no tokens of others: sub-agents share their session's name."""
    _, waiting = admitting(8000)

    async def sample(name: str, ids: Any) -> None:
        await waiting.generate(GenerateRequest(ids.astype(np.int32), {}, name))

    own = lambda name: np.concatenate([np.arange(5000), np.full(100, sum(name.encode()))])
    await asyncio.gather(*(sample(name, own(name)) for name in "abcdefgh"))
    assert waiting.held_turns == 0
    for ids in (np.arange(5000), np.arange(50)):
        for name in "abcd":
            await sample(name, ids)
    assert waiting._own >= 0


@in_virtual_time
async def test_a_cancelled_or_ended_wait_leaves_nothing() -> None:
    engine, waiting = admitting(4000)
    running = asyncio.create_task(turn(waiting, "a", 3000, seconds=5))
    await asyncio.sleep(0.1)
    cancelled, ended, after = (asyncio.create_task(turn(waiting, name, 3000)) for name in "bec")
    await asyncio.sleep(0.1)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    waiting.end("e")
    await asyncio.gather(running, ended)
    assert waiting.end("a") == 0
    await after
    assert engine.order[0] == "a" and engine.order[-1] == "c" and waiting.held == 0
    assert (waiting.end("b"), waiting.end("c"), waiting.end("c")) == (1, 1, 0)
    assert (waiting._own, waiting._blocks, waiting._idle) == (0, {}, {})
    await turn(waiting, "d", 3900)
    assert waiting.held_turns == 3


def rank(tokens: int, uncached: int, seconds: float) -> dict[str, int]:
    """What SGLang says of one rank: its room, and how long its prefills took."""
    names = ("max_total_num_tokens", "total_prefill_uncached_tokens", "total_prefill_busy_us")
    return dict(zip(names, (tokens, uncached, int(1e6 * seconds)), strict=True))


def test_the_load_is_read_from_what_sglang_says() -> None:
    one, unused = rank(1000, 500, 1.0), rank(1000, 0, 0.0)
    assert read_load({"loads": [one]}, {}) == Load(1000, 0.002)
    assert read_load({"loads": [one, one]}, {}) == Load(2000, 0.001)
    hierarchical = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}
    assert read_load({"loads": [one]}, hierarchical) == Load(2000, 0.002)
    assert read_load({"loads": [unused]}, {}) == Load(1000, 1e-4)
    older, large = {"max_total_num_tokens": 1000}, one | {"total_prefill_busy_us": 10**400}
    wrong: list[Any] = [[], [older], [one, 5], [large]]
    answers: list[Any] = [None, {}, *({"loads": ranks} for ranks in wrong)]
    assert [read_load(loads, {}) for loads in answers] == [None] * 6


class Stoppable(Pooled):
    """Aborts every request once it is halted."""

    halted = False

    def stopped(self) -> bool:
        return self.halted

    async def generate(self, request: GenerateRequest, **options: Any) -> Completion:
        for _ in range(50):
            await asyncio.sleep(0.1)
            if self.halted:
                return Completion(ONE[:0], None, "abort")
        return await super().generate(request, **options)


@in_virtual_time
async def test_episodes_that_wait_park_when_the_trainer_stops() -> None:
    """slime waits until every sample is over or parked."""
    engine = Stoppable(4000)
    waiting = Admission(engine)  # type: ignore[arg-type]

    async def play(name: str) -> Any:
        ids = np.full(3000, ord(name), dtype=np.int32)
        request = GenerateRequest(ids, {"max_new_tokens": 9}, name)
        completion = await generate_resumed(waiting, request, max_resumes=0)
        waiting.end(name)
        return completion.finish_reason

    episodes = [ParkableEpisode(name, engine.stopped) for name in "abcd"]
    for episode in episodes:
        episode.start(play(episode.session_id))
    await asyncio.sleep(1)
    assert waiting.held == 3
    engine.halted = True
    async with asyncio.timeout(10):
        await asyncio.gather(*(episode.parked.wait() for episode in episodes))
    engine.halted = False
    for episode in episodes:
        episode.resume(lambda: False, mask=False)
    tasks: list[Any] = [episode.task for episode in episodes]
    assert await asyncio.gather(*tasks) == ["stop"] * 4


class Hanging(Pooled):
    """Has 16 workers, none of which answers in 10 seconds."""

    async def workers(self) -> list[str]:
        return ["worker"] * 16

    async def get(self, url: str) -> Any:
        await asyncio.sleep(10)


@in_virtual_time
async def test_workers_that_do_not_answer_delay_the_first_turns_once() -> None:
    """Without counting against the time limit of a turn."""
    async with asyncio.timeout(5) as limit:
        with pausable(limit):
            await turn(Admission(Hanging(4000)), "a", 100)  # type: ignore[arg-type]
    assert now() < 11


def test_a_closed_event_loop_leaves_no_episode_admitted() -> None:
    """An episode can end after its event loop."""
    _, waiting = admitting(4000)
    for name in "abc":  # no two of them fit
        in_virtual_time(turn)(waiting, name, 3000)
    assert (waiting.held_turns, len(waiting._idle)) == (0, 1)
    assert waiting.end("c") == 0
