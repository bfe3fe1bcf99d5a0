"""Requests of the embedded engine: the log, which is the tests' oracle, aborts, and faults."""

import asyncio
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import ClientError
from support.embedded import Held, answer_of, held_call, says, session, wired
from support.hostile import drop_logprob
from support.loop_clock import skip
from support.wire import Answer

from toolroll.testing import (
    Fault,
    LoggedRequest,
    PolicyRequest,
    Reply,
    fault_at,
    reference_logprobs,
)


async def test_an_entry_is_what_was_asked_and_what_was_sent() -> None:
    """`input_ids` is a copy: a policy that writes into its request's does not change it."""

    def policy(request: Any) -> str:
        request.input_ids.setflags(write=True)
        request.input_ids[:] = 0
        return "Fine, thanks."

    params: dict[str, Any] = {"temperature": 0.7, "stop": ["thanks"]}
    headers = {"X-SMG-Routing-Key": "s", "X-Odd": "1"}
    answer, [entry] = await answer_of(
        policy, [300, 301], headers=headers, fields={"rid": "r"}, **params
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


async def test_calls_count_by_routing_key_in_the_order_of_their_start() -> None:
    go_on = asyncio.Event()
    line = lambda seen: Reply(f"{seen.routing_key}{seen.call}", hold=go_on, hold_after=1)
    async with wired(line, max_running=1) as (engine, wire):
        calls = [asyncio.create_task(wire.generate([300], **session(key))) for key in "abaab"]
        await engine.until(lambda engine: len(engine.log) == 5)
        go_on.set()
        texts = [answer.body["text"] for answer in await asyncio.gather(*calls)]
    assert sorted(texts) == ["a0", "a1", "a2", "b0", "b1"]
    keys = [entry.routing_key for entry in engine.log]
    counts = [keys[:number].count(key) for number, key in enumerate(keys)]
    assert [entry.call for entry in engine.log] == counts


# --- aborts, latency and weight versions, without a clock -----------------------------------------


IDS = [400 + at for at in range(40)]
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}


async def test_an_abort_is_a_200_with_what_was_sampled(tokenizer: Any) -> None:
    """The rest follows its resumption, as a model goes on in its own words: the policy is not
    called again.
    """
    async with wired(Held(IDS, after=7)) as (engine, wire):
        call = wire.generate([300], fields={"rid": "x"}, **session("s"))
        task = await held_call(engine, call)
        abort = await wire.post("/abort_request", {"rid": "x"})
        answer = await task
        resumed = await wire.generate([300, *answer.output_ids], **session("s"))
    assert (abort.status, abort.body, answer.status) == (200, "", 200)
    assert answer.meta["finish_reason"] == ABORTED
    assert answer.body["text"] == tokenizer.decode(IDS[:7])
    assert answer.meta["completion_tokens"] == 7 == answer.meta["output_token_logprobs_length"]
    assert answer.logprobs == reference_logprobs([300], IDS[:7])
    entry = engine.log[0]
    assert (entry.aborted, entry.finish_reason, entry.status) == (True, "abort", 200)
    assert answer.output_ids == entry.output_ids == IDS[:7]
    assert resumed.output_ids == IDS[7:]
    assert [entry.call for entry in engine.log] == [0, None]


async def test_an_abort_matches_by_prefix_or_does_nothing() -> None:
    policy, rids = Held(IDS, after=3), ("x1", "x10", "x2", "yx1")
    bodies: list[dict[str, Any]] = [{}, {"rid": ""}, {"rid": None}, {"rid": "unknown"}]
    async with wired(policy) as (engine, wire):
        tasks = [asyncio.create_task(wire.generate([300], fields={"rid": rid})) for rid in rids]
        await engine.until(lambda engine: engine.held == 4)
        for body in bodies:
            assert (await wire.post("/abort_request", body)).status == 200
        assert engine.held == 4
        await wire.post("/abort_request", {"rid": "x1"})
        await asyncio.gather(*tasks[:2])
        assert not any(task.done() for task in tasks[2:])
        policy.release()
        ends = [(await task).meta["finish_reason"]["type"] for task in tasks]
    assert ends == ["abort", "abort", "length", "length"]


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


async def test_latency_is_waited_unless_something_ends_the_request() -> None:
    """It may depend on the request. An abort, and an engine that closes, end what runs."""
    latency = lambda request: 100.0 if request.routing_key == "slow" else 0.0
    async with wired(says(IDS), latency=latency, token_latency=2.0) as (engine, wire):

        async def started(key: str, count: int) -> asyncio.Task[Answer]:
            task = asyncio.create_task(wire.generate([300], **session(key)))
            await engine.until(lambda engine: len(engine.log) == count)
            return task

        whole, quick = await started("slow", 1), await started("quick", 2)
        skip(100 + 39 * 2)
        assert (await quick).output_ids == IDS
        assert not whole.done()
        skip(2)
        assert (await whole).output_ids == IDS
        cut = await started("slow", 3)
        engine.abort(every=True)
        assert (await cut).output_ids == []
        late = await started("slow", 4)
        await engine.__aexit__()
        answer = (await asyncio.gather(late, return_exceptions=True))[0]
    assert engine.log[3].aborted
    assert isinstance(answer, Exception) or answer.meta["finish_reason"]["type"] == "abort"  # type: ignore[union-attr]


# --- each fault that it can be told to have -------------------------------------------------------


TEN = [400 + at for at in range(10)]


async def faulty(fault: Fault) -> tuple[Answer, LoggedRequest]:
    """The answer of an engine that says `TEN`, with `fault` in it, and the entry of the log."""
    answer, [entry] = await answer_of(says(TEN), engine={"faults": lambda request: fault})
    return answer, entry


def drop_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove `output_ids`, as in the answers of old engines."""
    del answer["output_ids"]
    return answer


def logprobs_of(body: Any) -> list[Any]:
    return [item[1] for item in body["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize(
    ("garble", "seen"),
    [
        (drop_logprob, lambda body: logprobs_of(body) == TEN[:9]),
        (drop_ids, lambda body: set(body) == {"text", "meta_info"}),
        (lambda body: [], lambda body: body == []),
    ],
)
async def test_a_garbled_answer_is_logged_as_it_was_sampled(garble: Any, seen: Any) -> None:
    answer, entry = await faulty(Fault(garble=garble))
    assert answer.status == 200 and seen(answer.body)
    assert (entry.output_ids, entry.faulted) == (TEN, True)
    assert entry.logprobs == reference_logprobs([300], TEN)


@pytest.mark.parametrize("after", [0, 1, 6, 10, 99])
async def test_an_abort_after_some_tokens(after: int) -> None:
    """With new weights from the second token on."""
    fault = Fault(abort_after=after, weight_version="new", switch_after=1)
    answer, entry = await faulty(fault)
    assert (answer.status, answer.meta["finish_reason"]["type"]) == (200, "abort")
    assert answer.output_ids == TEN[:after] == entry.output_ids
    assert answer.meta["completion_tokens"] == len(answer.logprobs) == min(after, 10)
    assert entry.aborted
    versions = [span["version"] for span in answer.meta["weight_versions"]]
    assert versions == ["default", "new"][:after]


@pytest.mark.parametrize(
    ("after", "spans"),
    [
        (0, [("new", 0, 10)]),
        (4, [("default", 0, 4), ("new", 4, 10)]),
        (10, [("default", 0, 10)]),
        (99, [("default", 0, 10)]),
    ],
)
async def test_weights_that_change_in_between(after: int, spans: list[Any]) -> None:
    faults = fault_at({0: Fault(weight_version="new", switch_after=after)})
    async with wired(says(TEN), faults=faults) as (engine, wire):
        answer, later = [await wire.generate([300]) for _ in range(2)]
    assert [tuple(span.values()) for span in answer.meta["weight_versions"]] == spans
    assert answer.meta["weight_version"] == engine.weight_version == "new"
    assert later.meta["weight_versions"] == [{"version": "new", "start": 0, "end": 10}]


async def test_a_plan_counts_requests_and_the_policy_answers() -> None:
    """Each request is in the log once, in the order of arrival: also one with a fault."""
    seen: list[tuple[int, int]] = []

    def policy(request: PolicyRequest) -> str:
        seen.append((request.index, request.call))
        return "Fine."

    plan = fault_at({0: Fault(status=500), 2: Fault(drop=True), 3: Fault(garble=drop_ids)})
    async with wired(policy, faults=plan) as (engine, wire):
        for index in range(5):
            try:
                answer = await wire.generate([300] * (index + 1))
                assert answer.status == engine.log[index].status
            except aiohttp.ClientConnectionError:
                assert index == 2
                await engine.until(lambda engine: engine.log[2].finished is not None)
    assert [entry.status for entry in engine.log] == [500, 200, 0, 200, 200]
    assert seen == [(1, 0), (3, 1), (4, 2)]
    assert [entry.faulted for entry in engine.log] == [True, False, True, True, False]
    assert [entry.call for entry in engine.log] == [None, 0, None, 1, 2]
    order = [(len(entry.input_ids) - 1, entry.arrival, entry.finished) for entry in engine.log]
    assert order == [(number,) * 3 for number in range(5)]
