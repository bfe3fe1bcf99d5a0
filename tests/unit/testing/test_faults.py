"""Every fault that the embedded engine can be told to have."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from support.embedded import answer_of, says, wired
from support.hostile import drop_logprob
from support.wire import Answer

from toolroll.testing import Fault, LoggedRequest, PolicyRequest, fault_at, reference_logprobs

IDS = [400 + at for at in range(10)]


async def faulty(fault: Fault) -> tuple[Answer, LoggedRequest]:
    """The answer of an engine that says `IDS`, with `fault` in it, and the entry of the log."""
    answer, [entry] = await answer_of(says(IDS), engine={"faults": lambda request: fault})
    return answer, entry


def shift_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    """Pair each id with the logprob of the next one."""
    items = answer["meta_info"]["output_token_logprobs"]
    answer["meta_info"]["output_token_logprobs"] = items[1:] + items[:1]
    return answer


def drop_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove `output_ids`, as in the answers of old engines."""
    del answer["output_ids"]
    return answer


async def test_a_status_with_its_body_and_headers() -> None:
    fault = Fault(status=429, body=b'{"message":"slow down"}', headers={"Retry-After": "3"})
    async with (
        wired(faults=lambda request: fault) as (engine, wire),
        wire.http.post(f"{engine.url}/generate", json={"input_ids": [300]}) as response,
    ):
        assert (response.status, response.headers["Retry-After"]) == (429, "3")
        assert await response.read() == fault.body
    [entry] = engine.log
    assert (entry.status, entry.faulted, entry.call, entry.output_ids) == (429, True, None, [])


async def test_a_malformed_answer() -> None:
    answer, _ = await faulty(Fault(status=200, body=b'{"text": "cut'))
    assert (answer.status, answer.body) == (200, '{"text": "cut')


async def test_a_dropped_connection() -> None:
    async with wired(faults=fault_at({0: Fault(drop=True)})) as (engine, wire):
        with pytest.raises(aiohttp.ClientConnectionError):
            await wire.generate([300])
        await engine.until(lambda engine: engine.log[0].finished is not None)
    assert (engine.log[0].status, engine.log[0].faulted) == (0, True)


async def test_an_answer_that_hangs() -> None:
    async with wired(faults=fault_at({0: Fault(hang=3600)})) as (engine, wire):
        task = asyncio.create_task(wire.generate([300]))
        await engine.until(lambda engine: len(engine.log) == 1)
        assert (await wire.generate([300])).status == 200  # the others go on
        assert not task.done()
        task.cancel()
        await engine.until(lambda engine: engine.log[0].finished is not None)
    assert engine.log[0].aborted


async def test_a_late_answer_is_whole() -> None:
    answer, _ = await faulty(Fault(hang=0.01))
    assert answer.output_ids == IDS


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
async def test_a_garbled_answer_is_logged_as_it_was_sampled(garble: Any, seen: Any) -> None:
    answer, entry = await faulty(Fault(garble=garble))
    assert answer.status == 200 and seen(answer.body)
    assert (entry.output_ids, entry.faulted) == (IDS, True)
    assert entry.logprobs == reference_logprobs([300], IDS)


@pytest.mark.parametrize("after", [0, 1, 6, 10, 99])
async def test_an_abort_after_some_tokens(after: int) -> None:
    """With new weights from the second token on."""
    fault = Fault(abort_after=after, weight_version="new", switch_after=1)
    answer, entry = await faulty(fault)
    assert (answer.status, answer.meta["finish_reason"]["type"]) == (200, "abort")
    assert answer.output_ids == IDS[:after] == entry.output_ids
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
async def test_weights_that_change_in_between(
    after: int, spans: list[tuple[str, int, int]]
) -> None:
    faults = fault_at({0: Fault(weight_version="new", switch_after=after)})
    async with wired(says(IDS), faults=faults) as (engine, wire):
        answer, later = [await wire.generate([300]) for _ in range(2)]
    assert [tuple(span.values()) for span in answer.meta["weight_versions"]] == spans
    assert answer.meta["weight_version"] == engine.weight_version == "new"
    assert later.meta["weight_versions"] == [{"version": "new", "start": 0, "end": 10}]


async def test_a_plan_counts_requests_and_the_policy_answers() -> None:
    seen: list[tuple[int, int]] = []

    def policy(request: PolicyRequest) -> str:
        seen.append((request.index, request.call))
        return "Fine."

    plan = fault_at({0: Fault(status=500), 2: Fault(drop=True), 3: Fault(garble=drop_ids)})
    async with wired(policy, faults=plan) as (engine, wire):
        for index in range(5):
            try:
                assert (await wire.generate([300])).status == engine.log[index].status
            except aiohttp.ClientConnectionError:
                assert index == 2
    assert [entry.status for entry in engine.log] == [500, 200, 0, 200, 200]
    assert seen == [(1, 0), (3, 1), (4, 2)]
    assert [entry.faulted for entry in engine.log] == [True, False, True, True, False]
