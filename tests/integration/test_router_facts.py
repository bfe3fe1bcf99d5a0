"""Facts about routers that toolroll relies on, checked without its own client."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import aiohttp
import numpy as np
import pytest
from support.wire import Wire, until

SESSIONS, TURNS = 16, 4
HELLO = 9707


@pytest.fixture
def routed(http: aiohttp.ClientSession, routed_sglang) -> Wire:  # type: ignore[no-untyped-def]
    routed_sglang.clear()
    return Wire(http, routed_sglang.url)


def tokens(count: int) -> list[int]:
    return np.random.default_rng(uuid.uuid4().int).integers(1000, 100_000, count).tolist()


async def play(routed: Wire, key: str) -> list[list[int]]:
    """The prompts of a session. Each turn's cache must hold the one before."""
    prompts, seen, prompt = [], 0, tokens(40)
    for _ in range(TURNS):
        params: Any = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 1.0}
        answer = await routed.generate(prompt, headers={"x-smg-routing-key": key}, **params)
        assert answer.status == 200
        assert answer.meta["cached_tokens"] >= seen - 1
        prompts.append(prompt)
        seen = len(prompt) + len(answer.output_ids)
        prompt = prompt + answer.output_ids + tokens(6)
    return prompts


async def test_a_session_stays_at_its_worker(routed: Wire, routed_sglang) -> None:  # type: ignore[no-untyped-def]
    keys = [uuid.uuid4().hex for _ in range(SESSIONS)]
    played = await asyncio.gather(*(play(routed, key) for key in keys))
    assert min(map(len, routed_sglang.sessions(keys))) >= 4
    seen = [each for proxy in routed_sglang.proxies for each in proxy.generations()]
    for key, prompts in zip(keys, played, strict=True):  # the ids come through, in order
        assert [each.json()["input_ids"] for each in seen if each.routing_key == key] == prompts


async def test_the_router_lists_its_workers_and_passes_no_abort_on(
    routed: Wire, routed_sglang: Any
) -> None:
    listed = (await routed.get("/workers")).body["workers"]
    assert {worker["url"] for worker in listed} == set(routed_sglang.worker_urls)
    for path in ("/abort_request", "/pause_generation", "/continue_generation"):
        assert (await routed.post(path, {})).status == 404
    assert (await routed.get("/model_info")).status == 404


async def test_the_router_drops_sampling_parameters_without_a_word(
    routed: Wire, routed_sglang: Any
) -> None:
    answer = await routed.generate(
        tokens(8), max_new_tokens=6, temperature=1.0, logit_bias={str(HELLO): 300.0}, bogus=1
    )
    assert answer.status == 200
    assert answer.output_ids != [HELLO] * 6
    (seen,) = [seen for proxy in routed_sglang.proxies for seen in proxy.generations()]
    assert "logit_bias" not in seen.json()["sampling_params"]


async def test_the_name_of_an_adapter_comes_through(routed: Wire) -> None:
    """To both workers, which have no such adapter: one was started without adapters."""
    answer = await routed.generate(tokens(8), fields={"lora_path": "absent"}, max_new_tokens=1)
    assert answer.status == 400
    assert "LoRA adapter" in answer.message and "absent" in answer.message


async def test_an_overflow_comes_through_and_harms_no_one(routed: Wire) -> None:
    """With the circuit breaker on, ten of them shut out every client."""
    for _ in range(12):
        answer = await routed.generate(tokens(4200), max_new_tokens=1)
        assert answer.status == 400
        assert "longer than the model's context length" in answer.message
    assert (await routed.generate(tokens(5), max_new_tokens=1)).status == 200


async def test_a_client_that_hangs_up_is_aborted_behind_the_router(
    routed: Wire, routed_sglang: Any
) -> None:
    rid = uuid.uuid4().hex
    task = asyncio.create_task(
        routed.generate(
            tokens(10), fields={"rid": rid}, max_new_tokens=3500, ignore_eos=True, temperature=1.0
        )
    )
    workers = [Wire(routed.http, worker.url) for worker in routed_sglang.workers]

    async def running() -> bool:
        return sum([await worker.running() for worker in workers]) > 0

    async def idle() -> bool:
        return not await running()

    await until(running, "a worker runs the request")
    task.cancel()
    await until(idle, "the abandoned request is gone")
    (seen,) = [seen for proxy in routed_sglang.proxies for seen in proxy.generations()]
    assert seen.hung_up
    logs = "\n".join(worker.log.read_text(errors="replace") for worker in routed_sglang.workers)
    lines = [line for line in logs.splitlines() if rid in line]
    assert any("disconnected from the client side" in line for line in lines)
