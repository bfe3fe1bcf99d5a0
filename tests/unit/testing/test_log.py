"""The embedded engine's request log: the tests' oracle."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from support.embedded import Held, answer_of, held_call, says, session, wired

from toolroll.testing import Fault, Reply, fault_at, reference_logprobs


async def test_an_entry_is_what_was_asked_and_what_was_sent() -> None:
    params: dict[str, Any] = {"temperature": 0.7, "stop": ["thanks"]}
    headers = {"X-SMG-Routing-Key": "s", "X-Odd": "1"}
    answer, [entry] = await answer_of(
        says("Fine, thanks."), [300, 301], headers=headers, fields={"rid": "r"}, **params
    )
    assert (entry.rid, entry.routing_key, entry.sampling_params) == ("r", "s", params)
    assert entry.input_ids.dtype == np.int32 and entry.input_ids.tolist() == [300, 301]
    assert entry.output_ids == answer.output_ids
    assert entry.logprobs == answer.logprobs == reference_logprobs([300, 301], answer.output_ids)
    assert (entry.finish_reason, entry.matched, entry.status) == ("stop", "thanks", 200)
    assert entry.weight_versions == answer.meta["weight_versions"]
    assert (entry.aborted, entry.faulted, entry.call) == (False, False, 0)
    assert entry.headers["x-odd"] == "1"
    assert (entry.arrival, entry.finished) == (0, 0)


async def test_every_request_is_there_once_and_in_the_order_of_arrival() -> None:
    """Refused, faulted and repeated ones too."""
    faults = fault_at({2: Fault(status=503)})
    async with wired(context_length=100, faults=faults) as (engine, wire):
        for length in (5, 200, 6, 7):
            await wire.generate([300] * length)
    log = [(len(entry.input_ids), entry.status, entry.call) for entry in engine.log]
    assert log == [(5, 200, 0), (200, 400, None), (6, 503, None), (7, 200, 1)]
    order = [(entry.arrival, entry.finished) for entry in engine.log]
    assert order == [(number, number) for number in range(4)]


async def test_the_order_of_the_ends_is_kept_too() -> None:
    held = Held([300], after=0)
    policy = lambda request: held(request) if request.routing_key == "slow" else "Fine."
    async with wired(policy) as (engine, wire):
        slow = await held_call(engine, wire.generate([300], **session("slow")))
        assert (engine.log[0].finished, engine.log[0].status) == (None, 0)
        await wire.generate([301])
        held.release()
        await slow
    assert [entry.finished for entry in engine.log] == [1, 0]


async def test_the_prompt_is_logged_as_it_came_not_as_it_became() -> None:
    """`input_ids` is a copy: a policy that writes into its request's does not change it."""

    def policy(request: Any) -> str:
        request.input_ids.setflags(write=True)
        request.input_ids[:] = 0
        return "Fine."

    answer, [entry] = await answer_of(policy, [300, 301])
    assert entry.input_ids.tolist() == [300, 301]
    assert answer.logprobs == reference_logprobs([300, 301], answer.output_ids)


async def test_calls_count_by_routing_key() -> None:
    async with wired(lambda request: f"{request.routing_key}{request.call}") as (engine, wire):
        texts = [(await wire.generate([300], **session(key))).body["text"] for key in "abaab"]
    assert texts == ["a0", "b0", "a1", "a2", "b1"]
    assert [entry.call for entry in engine.log] == [0, 0, 1, 2, 1]


async def test_requests_that_wait_count_in_the_order_of_their_start() -> None:
    go_on = asyncio.Event()
    line = lambda request: Reply(f"Line {request.call}.", hold=go_on, hold_after=1)
    async with wired(line, max_running=1) as (engine, wire):
        running = await held_call(engine, wire.generate([300]))
        tasks = [asyncio.create_task(wire.generate([300], **session("s"))) for _ in range(2)]
        await engine.until(lambda engine: len(engine.log) == 3)
        go_on.set()
        await running
        texts = [(await task).body["text"] for task in tasks]
    assert sorted(texts) == ["Line 0.", "Line 1."]
    assert [entry.call for entry in engine.log[1:]] == [0, 1]


async def test_a_log_that_is_not_kept() -> None:
    answer, log = await answer_of(engine={"keep_log": False})
    assert (answer.status, log) == (200, [])
