"""Every fault that the embedded engine can be told to have."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from support.embedded import says, wired
from support.hostile import drop_logprob

from toolroll.testing import Fault, PolicyRequest, fault_at, reference_logprobs

IDS = [400 + at for at in range(10)]


def always(fault: Fault) -> Any:
    return lambda request: fault


def faulty(tokenizer: Any, fault: Fault) -> Any:
    """An engine that says `IDS`, with `fault` in each answer, and a connection to it."""
    return wired(tokenizer, says(IDS), faults=always(fault))


def shift_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    """Pair each id with the logprob of the next one."""
    items = answer["meta_info"]["output_token_logprobs"]
    answer["meta_info"]["output_token_logprobs"] = items[1:] + items[:1]
    return answer


def drop_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove `output_ids`, as in the answers of old engines."""
    del answer["output_ids"]
    return answer


async def test_a_status_with_its_body_and_headers(tokenizer: Any) -> None:
    fault = Fault(status=429, body=b'{"message":"slow down"}', headers={"Retry-After": "3"})
    async with (
        wired(tokenizer, faults=always(fault)) as (engine, wire),
        wire.http.post(f"{engine.url}/generate", json={"input_ids": [300]}) as response,
    ):
        assert (response.status, response.headers["Retry-After"]) == (429, "3")
        assert await response.read() == fault.body
    [entry] = engine.log
    assert (entry.status, entry.faulted, entry.call, entry.output_ids) == (429, True, None, [])


async def test_a_malformed_answer(tokenizer: Any) -> None:
    async with faulty(tokenizer, Fault(status=200, body=b'{"text": "cut')) as (_, wire):
        answer = await wire.generate([300])
    assert (answer.status, answer.body) == (200, '{"text": "cut')


async def test_a_dropped_connection(tokenizer: Any) -> None:
    async with faulty(tokenizer, Fault(drop=True)) as (engine, wire):
        with pytest.raises(aiohttp.ClientConnectionError):
            await wire.generate([300])
        await engine.until(lambda engine: engine.log[0].finished is not None)
    assert (engine.log[0].status, engine.log[0].faulted) == (0, True)


async def test_an_answer_that_hangs(tokenizer: Any) -> None:
    async with wired(tokenizer, faults=fault_at({0: Fault(hang=3600)})) as (engine, wire):
        task = asyncio.create_task(wire.generate([300]))
        await engine.until(lambda engine: len(engine.log) == 1)
        assert (await wire.generate([300])).status == 200  # the others go on
        assert not task.done()
        task.cancel()
        await engine.until(lambda engine: engine.log[0].finished is not None)
    assert engine.log[0].aborted


async def test_a_late_answer_is_whole(tokenizer: Any) -> None:
    async with faulty(tokenizer, Fault(hang=0.01)) as (_, wire):
        assert (await wire.generate([300])).output_ids == IDS


def logprobs_of(body: Any) -> list[Any]:
    return [item[1] for item in body["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize(
    ("garble", "seen"),
    [
        (drop_logprob, lambda body: logprobs_of(body) == IDS[:9]),
        (shift_logprobs, lambda body: logprobs_of(body) == IDS[1:] + IDS[:1]),
        (drop_ids, lambda body: set(body) == {"text", "meta_info"}),
        (lambda body: [], lambda body: body == []),
    ],
)
async def test_a_garbled_answer_is_logged_as_it_was_sampled(
    tokenizer: Any, garble: Any, seen: Any
) -> None:
    async with faulty(tokenizer, Fault(garble=garble)) as (engine, wire):
        answer = await wire.generate([300])
    assert answer.status == 200 and seen(answer.body)
    [entry] = engine.log
    assert (entry.output_ids, entry.faulted) == (IDS, True)
    assert entry.logprobs == reference_logprobs([300], IDS)


@pytest.mark.parametrize("after", [0, 1, 6, 10, 99])
async def test_an_abort_after_some_tokens(tokenizer: Any, after: int) -> None:
    async with faulty(tokenizer, Fault(abort_after=after)) as (engine, wire):
        answer = await wire.generate([300])
    assert answer.status == 200
    assert answer.meta["finish_reason"]["type"] == "abort"
    assert answer.output_ids == IDS[:after] == engine.log[0].output_ids
    assert answer.meta["completion_tokens"] == len(answer.logprobs) == min(after, 10)
    assert engine.log[0].aborted


@pytest.mark.parametrize(
    ("after", "spans"),
    [
        (0, [("new", 0, 10)]),
        (4, [("default", 0, 4), ("new", 4, 10)]),
        (10, [("default", 0, 10)]),
        (99, [("default", 0, 10)]),
    ],
)
async def test_weights_that_change_after_some_tokens(
    tokenizer: Any, after: int, spans: list[tuple[str, int, int]]
) -> None:
    faults = fault_at({0: Fault(weight_version="new", switch_after=after)})
    async with wired(tokenizer, says(IDS), faults=faults) as (engine, wire):
        answer = await wire.generate([300])
        later = await wire.generate([300])
    assert [tuple(span.values()) for span in answer.meta["weight_versions"]] == spans
    assert answer.meta["weight_version"] == engine.weight_version == "new"
    assert later.meta["weight_versions"] == [{"version": "new", "start": 0, "end": 10}]


async def test_faults_combine(tokenizer: Any) -> None:
    fault = Fault(weight_version="new", switch_after=2, abort_after=5)
    async with faulty(tokenizer, fault) as (_, wire):
        answer = await wire.generate([300])
    assert answer.output_ids == IDS[:5]
    assert [span["version"] for span in answer.meta["weight_versions"]] == ["default", "new"]


async def test_a_plan_counts_requests_and_the_policy_answers(tokenizer: Any) -> None:
    seen: list[tuple[int, int]] = []

    def policy(request: PolicyRequest) -> str:
        seen.append((request.index, request.call))
        return "Fine."

    plan = fault_at({0: Fault(status=500), 2: Fault(drop=True), 3: Fault(garble=drop_ids)})
    async with wired(tokenizer, policy, faults=plan) as (engine, wire):
        statuses = []
        for _ in range(5):
            try:
                statuses.append((await wire.generate([300])).status)
            except aiohttp.ClientConnectionError:
                statuses.append(0)
    assert statuses == [500, 200, 0, 200, 200] == [entry.status for entry in engine.log]
    assert seen == [(1, 0), (3, 1), (4, 2)]
    assert [entry.faulted for entry in engine.log] == [True, False, True, True, False]
