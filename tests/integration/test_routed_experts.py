"""Routed experts from the real SGLang, with a tiny mixture of experts."""

import asyncio
import base64
from typing import Any

import numpy as np
from support.client import Watched
from support.processes import Server
from support.tiny_model import EXPERTS
from support.wire import Wire, until

from toolroll.rollout.engine import Engine, EngineConfig, generate_resumed
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session
from toolroll.rollout.types import GenerateRequest, Trajectory

LAYERS, TOP_K = EXPERTS
PROMPT = list(range(1000, 1020))


def begun_path() -> SessionPath:
    path = SessionPath(Session("s"))
    path.observe(PROMPT)
    return path


def asked(path: SessionPath, tokens: int) -> GenerateRequest:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    start = path.experts_end
    return GenerateRequest(path.input_ids, params, "s", routed_experts_start=start)


async def check(wire: Wire, trajectory: Trajectory) -> None:
    """Compare each row with what SGLang computes in one request with all tokens. In float32 the
    second pass over a token has the same experts, unless two are nearly equal; rows at the wrong
    tokens would agree in about one number of eight."""
    ids, fields = trajectory.input_ids.tolist(), {"return_routed_experts": True}
    answer = await wire.generate(ids, fields=fields, max_new_tokens=1, ignore_eos=True)
    encoded = answer.meta["routed_experts"]
    rows = np.frombuffer(base64.b64decode(encoded), dtype=np.int32).reshape(-1, LAYERS * TOP_K)
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts.shape == (len(trajectory) - 1, LAYERS * TOP_K)
    assert (trajectory.routed_experts == rows[: len(trajectory) - 1]).mean() > 0.98


async def _flushed(wire: Wire) -> bool:
    return (await wire.post("/flush_cache", {})).status == 200


async def test_rows_of_turns_add_up_to_those_of_the_sequence(sglang_moe: Server, http: Any) -> None:
    """Three turns and a fork, with the prefix cache emptied between them."""
    wire, path = Wire(http, sglang_moe.url), begun_path()
    sizes = []
    async with Engine(EngineConfig(engine=sglang_moe.url, return_routed_experts=True)) as engine:
        for number in range(4):
            if number == 3:
                path.fork([*path.input_ids[:30].tolist(), 7, 7], "rewritten")
            completion = await engine.generate(asked(path, 8))
            assert completion.routed_experts is not None
            sizes.append(len(completion.routed_experts))
            assert completion.routed_experts.dtype == np.uint8
            path.sample(completion, {})
            path.observe([5, 6, 7 + number])
            await until(lambda: _flushed(wire), "the prefix cache is empty")
    assert sizes[:3] == [27, 11, 11]
    trajectories = path.session.trajectories()
    assert len(trajectories) == 2
    for trajectory in trajectories:
        await check(wire, trajectory)


async def test_a_turn_that_is_aborted_and_resumed_has_all_rows(sglang_moe: Any, http: Any) -> None:
    wire, path = Wire(http, sglang_moe.url), begun_path()
    engine = Watched(EngineConfig(engine=sglang_moe.url, return_routed_experts=True))
    async with engine:
        begun = asyncio.Event()
        turn = generate_resumed(
            engine, asked(path, 300), max_resumes=3, progress=lambda ids: begun.set()
        )
        task = asyncio.ensure_future(turn)
        await begun.wait()
        await engine.abort_all()
        whole = await task
    parts = engine.parts
    assert len(parts) == 2 and parts[0].finish_reason == "abort" and len(parts[0].output_ids)
    path.sample(whole, {})
    [trajectory] = path.session.trajectories()
    await check(wire, trajectory)
    rows = [part.routed_experts for part in parts]
    assert sum(len(part) for part in rows if part is not None) == len(trajectory) - 1
