"""`Engine`: what it leaves behind at the engine where a call is cut off: nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from aiohttp import web
from support.client import client, client_of, embedded, flaky, request
from support.http import completion, http_server, says
from support.loop_clock import skip
from support.patience import PATIENCE

from toolroll.testing import Reply


async def test_an_abandoned_request_is_aborted_first(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang notices a client that has left only seconds later."""
    order: list[tuple[str, str]] = []
    arrived = asyncio.Event()

    async def handle(http: web.Request) -> web.StreamResponse:
        order.append((http.path, orjson.loads(await http.read())["rid"]))
        if len(order) == 1:
            arrived.set()
            await asyncio.Event().wait()
        return web.json_response(completion([3]))

    routes: dict[str, Any] = {"/generate": handle, "/abort_request": handle}
    async with client_of(routes, attempt_timeout=600) as calls:
        task = asyncio.create_task(calls.generate(request()))
        await arrived.wait()
        skip(601)
        answer = await task
    assert (answer.attempts, answer.output_ids.tolist()) == (2, [3])
    assert [path for path, _ in order] == ["/generate", "/abort_request", "/generate"]
    assert order[0][1] == order[1][1] != order[2][1]
    [line] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"request {order[0][1]} of session s is aborted: no answer" in line


async def test_a_cancelled_call_is_aborted_at_the_engine_and_no_other(tokenizer: Any) -> None:
    hold = asyncio.Event()
    async with embedded(tokenizer, lambda seen: Reply("Hello.", hold=hold)) as (engine, calls):
        requests = (calls.generate(request(session=name)) for name in ("doomed", "kept"))
        doomed, kept = map(asyncio.create_task, requests)
        await engine.until(lambda e: e.held == 2)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        await asyncio.wait_for(engine.until(lambda e: any(x.aborted for x in e.log)), PATIENCE)
        hold.set()
        assert (await kept).finish_reason == "stop"
        assert calls._in_flight == set()
    aborted = {entry.routing_key: entry.aborted for entry in engine.log}
    assert aborted == {"doomed": True, "kept": False}


async def test_an_abort_reaches_every_worker_behind_a_router() -> None:
    """Routers answer 404 to /abort_request."""
    rids, arrived = list[str](), asyncio.Event()

    async def generate(http: web.Request) -> web.StreamResponse:
        rids.append(orjson.loads(await http.read())["rid"])
        arrived.set()
        await asyncio.Event().wait()
        return web.Response()

    (at_first, one), (at_second, two) = flaky({}), flaky({})
    async with (
        http_server({"/abort_request": one}) as first,
        http_server({"/abort_request": two}) as second,
    ):
        listed = {"workers": [{"url": first, "id": "1"}, {"url": second}, {"id": "none"}]}
        routes = {"/generate": generate, "/workers": says(listed)}
        async with client_of(routes) as calls:
            task = asyncio.create_task(calls.generate(request()))
            await arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    aborted = [[body["rid"] for body in seen] for seen in (at_first, at_second)]
    assert aborted == [rids] * 2 and len(rids) == 1


async def test_abort_all_ends_the_requests_of_this_client_alone(tokenizer: Any) -> None:
    hold = asyncio.Event()
    held = Reply("one two three", hold=hold, hold_after=2)
    async with (
        embedded(tokenizer, lambda seen: held) as (engine, calls),
        client(engine.url) as other,
    ):
        names = ("mine1", "mine2", "mine3")
        mine = [asyncio.create_task(calls.generate(request(session=name))) for name in names]
        others = asyncio.create_task(other.generate(request(session="other")))
        await engine.until(lambda e: e.held == 4)
        await calls.abort_all()
        answers = await asyncio.gather(*mine)
        hold.set()
        assert (await others).finish_reason == "stop"
    assert [answer.finish_reason for answer in answers] == ["abort"] * 3
    assert all(len(answer.output_ids) == 2 == len(answer.logprobs) for answer in answers)  # type: ignore[arg-type]


async def test_an_abort_that_fails_is_no_error(gone: str) -> None:
    async with client_of({"/workers": says([{"url": gone}])}, abort_timeout=2.0) as calls:
        await calls.abort("r")


async def test_an_abort_that_is_refused_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of({"/abort_request": says({"message": "no"}, status=400)}) as calls:
        await calls.abort("r1")
    assert "/abort_request answers 400 to {'rid': 'r1'}" in caplog.text
