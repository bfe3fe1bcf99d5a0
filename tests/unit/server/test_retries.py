"""A retry gets the answer of the request that it repeats, and an equal request an own answer; what
is kept for retries.
"""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from support.loop_clock import skip
from support.patience import PATIENCE
from support.served import CHAT, RETRY, USER, in_session, numbered, serve, user

from toolroll.endpoint import replies
from toolroll.endpoint.answers.result import CompletionResult
from toolroll.endpoint.http.json_response import JsonResponse
from toolroll.endpoint.sessions.pending import PendingRequest, PendingRequests, request_key
from toolroll.testing import Fault, Reply, fault_at

PATH = in_session(CHAT)
BODY = {"messages": [USER]}


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def test_a_retrys_key_does_not_depend_on_the_order_of_keys() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "seen"}
    talk: list[Any] = [USER, called('{"at": 1}'), result, USER]
    body = {"messages": talk, "model": "m", "temperature": 0.5}
    turned = {
        "temperature": 0.5,
        "model": "m",
        "messages": [dict(reversed(message.items())) for message in talk],
    }
    assert request_key("chat", turned) == request_key("chat", body)
    changed = [
        {**body, "temperature": 0.6},
        {**body, "messages": talk[:3]},
        {**body, "messages": [*talk, USER]},
        {**body, "messages": [user("Ho"), *talk[1:]]},
        *(
            {**body, "messages": [USER, called({"at": value}), *talk[2:]]}
            for value in (1, 1.0, True)
        ),
    ]
    keys = {request_key("chat", other) for other in (body, *changed)}
    assert len(keys | {request_key("text", body)}) == len(changed) + 2


@pytest.mark.parametrize("numbers", [range(10, 0, -1), [7, 2, 2, 9, 1, 7, 3, 8, 1, 5]], ids=str)
async def test_racing_retries_of_one_request_are_one_answer(numbers: Any) -> None:
    gate = asyncio.Event()
    hold = lambda request: Reply(f"Reply {request.index}.", hold=gate, hold_after=1)
    async with serve(hold) as bench:
        asking = [
            asyncio.create_task(bench.send(PATH, BODY, **{"x-stainless-retry-count": str(number)}))
            for number in numbers
        ]
        await bench.engine.until(lambda engine: engine.held >= 1)
        pending = bench.endpoint.sessions.find("s").pending
        while sum(work.waiting for work in pending.all()) < len(asking):
            await asyncio.sleep(0)
        gate.set()
        answers = [*await asyncio.gather(*asking), await bench.send(PATH, BODY, **RETRY)]
        assert len({answer["id"] for answer in answers}) == 1
        assert len(bench.engine.log) == 1
        await bench.one_trajectory(turns=1)


async def test_a_retry_after_an_error_takes_no_answer_of_another() -> None:
    """Samples of one prompt in one session have equal bodies: one answer had two receivers."""
    async with serve(numbered, faults=fault_at({0: Fault(abort_after=1)})) as bench:
        assert (await bench.refusal(PATH, BODY))[0] == 503
        equal = await bench.send(PATH, BODY)
        again = await bench.send(PATH, BODY, **RETRY)
        assert equal["id"] != again["id"]
        lost = await bench.send(PATH, BODY, **RETRY)
        assert lost["id"] in (equal["id"], again["id"]), "only one retry follows the error"
        assert len(await bench.trajectories(refused=1)) == 2


async def test_a_retry_after_a_refusal_takes_no_answer_of_another() -> None:
    gate = asyncio.Event()
    hold = lambda request: Reply(f"Reply {request.index}.", hold=gate, hold_after=1)
    async with serve(hold, settings={"max_in_flight": 1}) as bench:
        asking = asyncio.create_task(bench.send(PATH, BODY))
        await bench.engine.until(lambda engine: engine.held == 1)
        assert (await bench.refusal(PATH, BODY))[0] == 429
        gate.set()
        equal = await asking
        again = await bench.send(PATH, BODY, **RETRY)
        assert equal["id"] != again["id"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_retry_of_a_repeated_request_gets_the_last(tmp_path: Path, restarted: bool) -> None:
    """The client sent the request again, so it has the first answer."""
    async with serve(numbered, out=tmp_path) as bench:
        await bench.send(PATH, BODY)
        last = await bench.send(PATH, BODY)
        if not restarted:
            assert await bench.send(PATH, BODY, **RETRY) == last
            return
    async with serve(numbered, out=tmp_path) as bench:
        assert await bench.send(PATH, BODY, **RETRY) == last


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_written_is_written_again_for_a_retry(stream: bool) -> None:
    """Neither the body, nor the prompt's ids as JSON text are kept."""
    async with serve() as bench:
        answers = []
        for headers in ({}, RETRY):
            body = {**BODY, "stream": stream}
            async with bench.http.post(bench.url + PATH, json=body, headers=headers) as response:
                answers.append(await response.read())
        assert answers[0] == answers[1]
        [reply] = bench.endpoint.sessions.find("s").pending.all()
        assert isinstance(reply, replies.Reply) and "prompt_json" not in vars(reply.result)
        gc.collect()  # the responses of other tests
        responses = [each for each in gc.get_objects() if isinstance(each, JsonResponse)]
        assert stream or responses
        assert all(response.body is None for response in responses)


async def test_answers_that_no_retry_can_request_are_dropped() -> None:
    """Neither the siblings of the answer that the client went on from, nor answers that it never
    went on from.
    """
    async with serve(numbered, settings={"grace": 600}) as bench:
        messages, ids = [USER], set()
        for _ in range(3):
            answer = await bench.ask(*messages, n=2)
            ids.add(answer["id"])
            messages = [*messages, answer["choices"][0]["message"], USER]
        live = bench.endpoint.sessions.find("s")
        assert len(live.pending._by_key) == 1  # the client has gone on from the others
        skip(601)
        while live.pending.all():
            await asyncio.sleep(0)
        gc.collect()
        results = [each for each in gc.get_objects() if type(each) is CompletionResult]
        assert [result.id for result in results if result.id in ids] == []
        assert len(await bench.trajectories()) == 4


class Request(PendingRequest):
    async def run(self) -> CompletionResult:
        raise AssertionError("it never begins")


async def test_a_request_cancelled_at_once_wakes_its_followers() -> None:
    request = Request(b"key", 1)
    PendingRequests(0.0).start(request)
    changed = request.changed
    request.task.cancel()
    await asyncio.wait_for(changed.wait(), PATIENCE)
    assert request.failed
