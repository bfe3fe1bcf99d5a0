"""The benchmark of a real engine, with the tiny model."""

from typing import Any

from benchmarks import engine
from benchmarks.engine import Bench, Load, run
from benchmarks.world import Material
from support.qwen import qwen3_tokenizer

from toolroll.rollout.template import ChatTemplate

LOAD = Load(episodes=4, warmup=0.5, seconds=2.0, tokens=8)


async def test_throughput_and_logprobs_are_measured(sglang_float32: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine, "TURNS", 2)  # the tiny model takes a short context
    first: list[Any] = [[{"role": "user", "content": "Hello"}]]
    bench = Bench(
        sglang_float32.url,
        ChatTemplate(qwen3_tokenizer()),
        Material(first, [], ["fine"], ["And?"]),
        [],
    )
    throughput, exactness = await run(bench, LOAD, sequences=3)
    assert [float(row[1].replace(",", "")) > 0 for row in throughput.rows] == [True] * 3
    assert exactness.figures["mean"] < 1e-4
    assert exactness.figures["off"] > 1.0
