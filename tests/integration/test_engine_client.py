"""Our engine client with the real server: streams, aborts, LoRA adapters that each request names,
episodes that wait between turns, and the benchmark."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from benchmarks import engine as benchmark
from benchmarks.world import Material
from support.client import request
from support.processes import Server
from support.qwen import qwen3_tokenizer
from support.tiny_model import logprobs_with
from support.wire import until

from toolroll.rollout.engine import Admission, Engine, EngineConfig
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session
from toolroll.rollout.session.trajectory_json import from_json, to_json
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import GenerateRequest, IdArray

PROMPT = [9707, 11, 1879]


async def test_streams_keep_every_check(sglang_float32: Server) -> None:
    """Random ids, padding rows included; nothing that the server sends is taken for hostile."""
    seen: list[list[int]] = []
    size = len(qwen3_tokenizer())
    async with Engine(EngineConfig(engine=sglang_float32.url, vocab_size=size)) as engine:
        params = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 2.0}
        answer = await engine.generate(
            request(PROMPT, sampling_params=params), progress=lambda ids: seen.append(list(ids))
        )
        longer = request([*PROMPT, *answer.output_ids], sampling_params=params)
        plain = await engine.generate(longer)
    assert seen[-1] == answer.output_ids.tolist() and len(seen) > 1
    assert len(plain.output_ids) == len(answer.output_ids) == 200


def likeliest(answer: Any) -> list[list[int]]:
    return [[index for _, index in place] for place in answer.top_logprobs]


async def test_an_answer_is_the_same_streamed_or_not(sglang_small: Server) -> None:
    """From a server that sends only the new ids in each event of a stream."""
    params = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    turn = request(PROMPT, sampling_params=params, extra={"top_logprobs_num": 2})
    seen: list[Sequence[int]] = []
    async with Engine(sglang_small.url) as engine:
        await engine.generate(turn)  # so that both find the prompt in the cache
        whole = await engine.generate(turn)
        streamed = await engine.generate(turn, progress=seen.append)
    ids = whole.output_ids.tolist()
    assert streamed.output_ids.tolist() == ids and len(ids) == 40
    assert len(seen) > 1 and all(list(part) == ids[: len(part)] for part in seen)
    assert whole.logprobs is not None
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    assert likeliest(streamed) == likeliest(whole)
    assert (streamed.text, streamed.weight_versions) == (whole.text, whole.weight_versions)


@pytest.mark.parametrize("routed", [False, True])
async def test_our_abort_reaches_the_server(routed_sglang: Any, http: Any, routed: bool) -> None:
    """Which refuses it with a 400 if its body is not sent as JSON."""
    url = routed_sglang.url if routed else routed_sglang.workers[0].url
    params = {"max_new_tokens": 3500, "ignore_eos": True, "temperature": 1.0}
    async with Engine(EngineConfig(engine=url)) as engine:
        task = asyncio.create_task(engine.generate(request(PROMPT, sampling_params=params)))
        await until(partial(routed_sglang.running, http), "the request runs")
        await engine.abort_all()
        answer = await task
    assert answer.finish_reason == "abort" and len(answer.output_ids) < 3500


# --- adapters -------------------------------------------------------------------------------------


async def test_each_turn_is_of_the_adapter_it_names(second_float32: Server, adapters: Any) -> None:
    """Later turns find the earlier tokens in the cache of the same adapter only."""
    path = SessionPath(Session("s"))
    path.observe(list(range(1000, 1020)))
    names = [None, "one", "one", "two", None]
    async with Engine(second_float32.url) as engine:
        for name in names:
            params = {"max_new_tokens": 8, "ignore_eos": True, "lora_path": name}
            completion = await engine.generate(GenerateRequest(path.input_ids, params, "s"))
            path.sample(completion, params)
            path.observe([5, 6, 7])
    [trajectory] = path.session.trajectories()
    recorded = from_json(to_json(trajectory))
    assert [turn.sampling_params.get("lora_path") for turn in recorded.turns] == names
    for name, turn in zip(names, recorded.turns, strict=True):
        ids, own = recorded.input_ids[: turn.stop], recorded.logprobs[turn.start : turn.stop]
        errors = {
            other: np.abs(logprobs_with(folder, ids, turn.start) - own).max()
            for other, folder in adapters.items()
        }
        assert errors.pop(name) < 1e-3 and min(errors.values()) > 0.1, errors


# --- admission ------------------------------------------------------------------------------------

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
            completion = await waiting.generate(GenerateRequest(prompt, params, name))
            twice += max(0, known - 1 - completion.cached_tokens)
            known = len(prompt) + SAMPLED
            prompt = np.concatenate([prompt, completion.output_ids, fresh(source, STEP)])
        waiting.end(name)
        return twice

    return sum(await asyncio.gather(*map(play, range(EPISODES))))


async def test_at_four_times_the_cache_few_tokens_are_computed_twice(sglang_small: Server) -> None:
    async with Engine(sglang_small.url) as engine:
        plain = await computed_twice(Admission(engine, 0.0), 1)
        waiting = Admission(engine)
        held = await computed_twice(waiting, 2)
    assert plain >= 3 * held, f"{plain} and {held} tokens, {waiting.held_turns} turns held"


async def test_throughput_and_logprobs_are_measured(sglang_float32: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(benchmark, "TURNS", 2)  # the tiny model takes a short context
    first: list[Any] = [[{"role": "user", "content": "Hello"}]]
    bench = benchmark.Bench(
        sglang_float32.url,
        ChatTemplate(qwen3_tokenizer()),
        Material(first, [], ["fine"], ["And?"]),
        [],
    )
    load = benchmark.Load(episodes=4, warmup=0.5, seconds=2.0, tokens=8)
    throughput, exactness = await benchmark.run(bench, load, sequences=3)
    assert [float(row[1].replace(",", "")) > 0 for row in throughput.rows] == [True] * 3
    assert exactness.figures["mean"] < 1e-4
    assert exactness.figures["off"] > 1.0
