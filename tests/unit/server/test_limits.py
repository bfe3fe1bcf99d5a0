"""How much a client may ask for, when a session ends, and what each failure says."""

from __future__ import annotations

import asyncio

import pytest
from support.served import CHAT, USER, in_session, serve, user

from toolroll.testing import Fault, PolicyRequest, Reply

PATH = in_session(CHAT)
BODY = {"messages": [USER]}


def busy(request: PolicyRequest) -> Reply:
    """Hold the answer to the session "busy" after its first token."""
    hold = asyncio.Event() if request.routing_key == "busy" else None
    return Reply("Hello.", hold=hold, hold_after=1)


async def test_limits_have_clear_errors() -> None:
    limits = {"max_sessions": 2, "max_nodes": 4, "max_body": 4096, "max_in_flight": 2}
    async with serve(busy, settings=limits) as bench:
        refusal = await bench.refusal(PATH, {"messages": [user("x" * 5000)]})
        assert refusal[:2] == (413, "body_too_large")
        for text in "ab":
            await bench.ask(user(text))
        assert (await bench.refusal(PATH, BODY))[1] == "session_full"
        path = in_session(CHAT, "busy")
        waiting = [asyncio.create_task(bench.post(path, BODY)) for _ in range(2)]
        await bench.engine.until(lambda engine: engine.held == 2)
        assert (await bench.refusal(path, BODY))[1] == "too_many_requests"
        assert (await bench.refusal(in_session(CHAT, "t"), BODY))[1] == "too_many_sessions"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_unused_session_is_dropped_and_a_used_one_is_not() -> None:
    async with serve(busy, settings={"idle": 1000.0}) as bench:
        waiting = asyncio.create_task(bench.ask(USER, session="busy"))
        await bench.engine.until(lambda engine: engine.held == 1)
        for name in ("old", "young"):
            await bench.ask(USER, session=name)
        for live in bench.endpoint.sessions.all():
            live.used -= 0.0 if live.id == "young" else 1001.0
        bench.endpoint.sessions.drop_idle()
        # the busy one is waited for, and keeps nobody else
        assert bench.ids() == ["busy", "young"]
        waiting.cancel()


async def test_deleting_a_session_aborts_what_runs_in_it() -> None:
    async with serve(busy) as bench:
        waiting = asyncio.create_task(bench.refusal(in_session(CHAT, "busy"), BODY))
        await bench.engine.until(lambda engine: engine.held == 1)
        assert await bench.delete("busy") == 200
        assert (await waiting)[:2] == (409, "request_aborted")
        await bench.engine.until(lambda engine: engine.log[0].finished is not None)
        assert bench.engine.log[0].aborted


@pytest.mark.parametrize(
    ("fault", "status", "code", "retry"),
    [
        (Fault(status=503, body=b'{"error":"busy"}'), 503, "engine_overloaded", "true"),
        (Fault(status=400, body=b'{"error":{"message":"no"}}'), 400, "engine_refused", "false"),
        (Fault(status=500, body=b"boom"), 502, "engine_error", "true"),
        (Fault(drop=True), 502, "engine_error", "true"),
        (Fault(abort_after=1), 503, "engine_aborted", "true"),
        (Fault(hang=60), 504, "timeout", "true"),
        (Fault(status=200, body=b"no JSON"), 502, "engine_error", "true"),
    ],
    ids=["busy", "refused", "error", "dropped", "aborted", "hanging", "no JSON"],
)
async def test_each_failure_has_its_code_and_says_whether_to_retry(
    fault: Fault, status: int, code: str, retry: str
) -> None:
    settings = {"timeout": 0.3} if fault.hang else {}
    faults = lambda request: fault if request.index == 0 else None
    async with serve(faults=faults, config={"retries": 0}, settings=settings) as bench:
        async with bench.http.post(bench.url + PATH, json=BODY) as response:
            error = (await response.json())["error"]
            answer = (response.status, error["code"], response.headers["x-should-retry"])
            assert answer == (status, code, retry)
        assert not bench.endpoint.sessions.find("s").failures  # their tracebacks hold requests
        if not fault.hang:
            await bench.ask(USER)  # one failure touches no other request
            assert len(await bench.trajectories(refused=fault.abort_after is not None)) == 1
