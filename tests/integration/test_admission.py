"""Episodes that wait between turns, on the real server with a small KV cache."""

from __future__ import annotations

import asyncio

import numpy as np
from support.processes import Server

from toolroll.rollout.engine import Admission, Engine
from toolroll.rollout.types import GenerateRequest, IdArray

EPISODES, TURNS = 12, 6
FIRST, STEP, SAMPLED = 300, 120, 8
"""An episode ends with about 1,000 tokens."""


def fresh(source: np.random.Generator, count: int) -> IdArray:
    return source.integers(1000, 100_000, count).astype(np.int32)


async def computed_twice(waiting: Admission, seed: int) -> int:
    async def play(number: int) -> int:
        source, twice, known = np.random.default_rng((seed, number)), 0, 0
        name, prompt = f"{seed}/{number}", fresh(source, FIRST)
        params = {"max_new_tokens": SAMPLED, "ignore_eos": True, "temperature": 0.0}
        for _ in range(TURNS):
            request = GenerateRequest(prompt, params, name)
            completion = await waiting.generate(request)
            twice += max(0, known - 1 - completion.cached_tokens)
            known = len(prompt) + SAMPLED
            prompt = np.concatenate([prompt, completion.output_ids, fresh(source, STEP)])
        waiting.end(name)
        return twice

    return sum(await asyncio.gather(*map(play, range(EPISODES))))


async def test_at_four_times_the_cache_far_fewer_tokens_are_computed_twice(
    sglang_small: Server,
) -> None:
    async with Engine(sglang_small.url) as engine:
        plain = await computed_twice(Admission(engine, 0.0), 1)
        waiting = Admission(engine)
        held = await computed_twice(waiting, 2)
    assert plain >= 3 * held, f"{plain} and {held} tokens, {waiting.held_turns} turns held"
