"""Aborts, latency and weight versions of the embedded engine, without a clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import ClientError
from support.embedded import Held, held_call, says, session, wired
from support.loop_clock import skip

from toolroll.testing import PolicyRequest, reference_logprobs

IDS = [400 + at for at in range(40)]
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}


async def test_an_abort_is_a_200_with_what_was_sampled(tokenizer: Any) -> None:
    async with wired(Held(IDS, after=7)) as (engine, wire):
        task = await held_call(engine, wire.generate([300], fields={"rid": "x"}))
        abort = await wire.post("/abort_request", {"rid": "x"})
        answer = await task
    assert (abort.status, abort.body, answer.status) == (200, "", 200)
    assert answer.meta["finish_reason"] == ABORTED
    assert answer.body["text"] == tokenizer.decode(IDS[:7])
    assert answer.meta["completion_tokens"] == 7 == answer.meta["output_token_logprobs_length"]
    assert answer.logprobs == reference_logprobs([300], IDS[:7])
    [entry] = engine.log
    assert (entry.aborted, entry.finish_reason, entry.status) == (True, "abort", 200)
    assert answer.output_ids == entry.output_ids == IDS[:7]


async def test_an_abort_matches_by_prefix() -> None:
    policy, rids = Held(IDS, after=3), ("x1", "x10", "x2", "yx1")
    async with wired(policy) as (engine, wire):
        tasks = [asyncio.create_task(wire.generate([300], fields={"rid": rid})) for rid in rids]
        await engine.until(lambda engine: engine.held == 4)
        await wire.post("/abort_request", {"rid": "x1"})
        await asyncio.gather(*tasks[:2])
        assert not any(task.done() for task in tasks[2:])
        policy.release()
        ends = [(await task).meta["finish_reason"]["type"] for task in tasks]
    assert ends == ["abort", "abort", "length", "length"]


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": None}, {"rid": "unknown"}])
async def test_an_abort_of_nothing_is_a_200_and_does_nothing(body: dict[str, Any]) -> None:
    policy = Held(IDS, after=3)
    async with wired(policy) as (engine, wire):
        task = await held_call(engine, wire.generate([300], fields={"rid": "x"}))
        assert (await wire.post("/abort_request", body)).status == 200
        policy.release()
        assert (await task).output_ids == IDS


async def test_abort_all_ends_whatever_runs_and_whatever_waits() -> None:
    async with wired(Held(IDS, after=2), max_running=1) as (engine, wire):
        running = await held_call(engine, wire.generate([300]))
        waiting = asyncio.create_task(wire.generate([301]))
        await engine.until(lambda engine: len(engine.log) == 2)
        await wire.post("/abort_request", {"abort_all": True})
        ran, waited = await running, await waiting
    assert (ran.meta["finish_reason"], ran.output_ids) == (ABORTED, IDS[:2])
    assert (waited.status, waited.output_ids, waited.body["text"]) == (200, [], "")
    assert waited.meta["finish_reason"] == IN_QUEUE
    assert "prompt_tokens" not in waited.meta and "cached_tokens" not in waited.meta
    assert [entry.aborted for entry in engine.log] == [True, True]


async def test_a_client_that_hangs_up_is_aborted() -> None:
    async with wired(Held(IDS, after=2)) as (engine, wire):
        task = await held_call(engine, wire.generate([300]))
        task.cancel()
        await engine.until(lambda engine: engine.log[0].finished is not None)
    [entry] = engine.log
    assert (entry.aborted, entry.status, entry.output_ids) == (True, 0, [])


async def test_a_stream_to_a_closed_connection_aborts(caplog: pytest.LogCaptureFixture) -> None:
    def hang_up(request: PolicyRequest) -> str:
        runner: Any = engine._runner
        for connection in runner.server.connections:
            connection.transport.close()
        return "Fine."

    async with wired(hang_up) as (engine, wire):
        with pytest.raises(ClientError):
            await wire.generate([300], fields={"stream": True})
        await engine.until(lambda engine: engine.log[0].finished is not None)
    [entry] = engine.log
    assert (entry.aborted, entry.status) == (True, 0)
    assert "Error handling request" not in caplog.text


async def test_the_rest_of_an_aborted_answer_follows_its_resumption() -> None:
    """As a model goes on in its own words, the policy is not asked again."""
    policy = Held(IDS, after=5)
    async with wired(policy) as (engine, wire):
        task = await held_call(engine, wire.generate([300], **session("s")))
        engine.abort(every=True)
        partial = await task
        resumed = await wire.generate([300, *partial.output_ids], **session("s"))
    assert partial.output_ids + resumed.output_ids == IDS
    assert [entry.call for entry in engine.log] == [0, None]


async def test_latency_is_waited() -> None:
    begun = asyncio.Event()

    def latency(request: PolicyRequest) -> float:
        begun.set()
        return 100.0

    async with wired(says(IDS), latency=latency, token_latency=2.0) as (_, wire):
        task = asyncio.create_task(wire.generate([300]))
        await begun.wait()
        skip(100 + 39 * 2)
        await wire.get("/health")  # time for what is due to come
        assert not task.done()
        skip(2)
        assert (await task).output_ids == IDS


async def test_latency_may_depend_on_the_request() -> None:
    latency = lambda request: 3600.0 if request.routing_key == "slow" else 0.0
    async with wired(says(IDS), latency=latency) as (engine, wire):
        slow = asyncio.create_task(wire.generate([300], **session("slow")))
        await engine.until(lambda engine: len(engine.log) == 1)
        assert (await wire.generate([300])).output_ids == IDS
        assert not slow.done()
        engine.abort(every=True)
        assert (await slow).output_ids == []  # an hour for 40 tokens: none is there by now


async def test_an_engine_that_closes_ends_what_runs() -> None:
    async with wired(says(IDS), latency=3600.0) as (engine, wire):
        task = asyncio.create_task(wire.generate([300]))
        await engine.until(lambda engine: len(engine.log) == 1)
        await engine.__aexit__()
        answer = (await asyncio.gather(task, return_exceptions=True))[0]
    assert engine.log[0].aborted
    assert isinstance(answer, Exception) or answer.meta["finish_reason"]["type"] == "abort"  # type: ignore[union-attr]


async def test_weights_that_change_in_mid_answer_show_in_its_spans() -> None:
    policy = Held(IDS, after=7)
    async with wired(policy, weight_version="step9") as (engine, wire):
        task = await held_call(engine, wire.generate([300]))
        engine.set_weight_version("step20")
        policy.release()
        answer = await task
        later = await wire.generate([301])
        info = await wire.get("/model_info")
    spans = [
        {"version": "step9", "start": 0, "end": 7},
        {"version": "step20", "start": 7, "end": 40},
    ]
    assert answer.meta["weight_versions"] == spans == engine.log[0].weight_versions
    assert answer.meta["weight_version"] == "step20" == info.body["weight_version"]
    assert later.meta["weight_versions"] == [{"version": "step20", "start": 0, "end": 40}]
    assert answer.logprobs == reference_logprobs([300], IDS)
