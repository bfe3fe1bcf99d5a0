"""Who may ask, how much, and what an id may be."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
from openai import AuthenticationError
from support.endpoints import Bench, endpoint
from yarl import URL

from toolroll.endpoint import EndpointSettings
from toolroll.endpoint.http.access import session_key
from toolroll.rollout.errors import UsageError
from toolroll.testing import Fault, PolicyRequest, Reply

USER: Any = {"role": "user", "content": "Hi"}
KEY = "a-secret-key"
JSON = {"Content-Type": "application/json"}


async def chat(bench: Bench, session: str = "s", **more: Any) -> tuple[int, Any]:
    return await bench.post(
        f"/sessions/{session}/v1/chat/completions", {"messages": [USER], **more}
    )


def test_another_address_than_loopback_needs_a_key() -> None:
    for host in ("0.0.0.0", "192.168.0.1", "::"):
        with pytest.raises(UsageError, match="api_key"):
            EndpointSettings(host=host)
        EndpointSettings(host=host, api_key=KEY)
    with pytest.raises(UsageError):
        EndpointSettings(api_key="short")


async def test_a_key_opens_everything_and_a_sessions_key_its_session(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.", settings={"api_key": KEY}) as bench:
        for wrong in ("unused", KEY + "x", KEY[:-1], session_key(KEY, "other")):
            with pytest.raises(AuthenticationError) as caught:
                await bench.client("s", api_key=wrong).chat.completions.create(
                    model="m", messages=[USER]
                )
            assert caught.value.code == "invalid_api_key"
        owner = {"Authorization": f"Bearer {KEY}"}
        status, made = await bench.post("/sessions", {"session_id": "s"}, **owner)
        assert (status, made["api_key"]) == (201, session_key(KEY, "s"))
        await bench.client("s", api_key=made["api_key"]).chat.completions.create(
            model="m", messages=[USER]
        )
        await bench.client("s", api_key=KEY).chat.completions.create(model="m", messages=[USER])
        mine = {"Authorization": f"Bearer {made['api_key']}"}
        assert (await bench.post("/sessions/s/reward", {"reward": 1}, **mine))[0] == 200
        assert (await bench.post("/sessions/other/reward", {"reward": 1}, **mine))[0] == 401
        assert (await bench.post("/sessions", {"session_id": "other"}, **mine))[0] == 401
        body = {"messages": [USER], "session_id": "other"}
        assert (await bench.post("/v1/chat/completions", body, **mine))[0] == 401
        assert (await bench.post("/sessions/s/v1/chat/completions", body, **mine))[0] == 400
        assert (await bench.post("/v1/chat/completions", body, **mine, **{"x-session-id": "s"}))[
            0
        ] == 400
        assert (await bench.get("/health"))["status"] == "ok"
        assert len(bench.engine.log) == 2


@pytest.mark.parametrize(
    "bad",
    ["..", "a/b", "a%2Fb", "%2e%2e", "a b", "a\u00e9", "-a", "a" * 129, "a\r\nx-evil: 1", "{}"],
)
async def test_an_id_is_checked_before_it_is_used(tokenizer: Any, bad: str) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        status, answer = await bench.post(
            "/v1/chat/completions", {"messages": [USER], "session_id": bad}
        )
        assert (status, answer["error"]["code"]) == (400, "invalid_session_id")
        if "." not in bad and "%2e" not in bad:  # an HTTP client resolves those itself
            path = URL(f"{bench.url}/sessions/{bad.strip()}/v1/chat/completions")
            async with bench.http.post(path, json={"messages": [USER]}) as response:
                assert response.status in (400, 404, 405)
        assert bench.engine.log == []
        assert len(bench.endpoint.sessions) == 0


def busy(request: PolicyRequest) -> Reply:
    """Hold the answer to the session "busy" after its first token."""
    hold = asyncio.Event() if request.routing_key == "busy" else None
    return Reply("Hello.", hold=hold, hold_after=1)


async def test_limits_have_clear_errors(tokenizer: Any) -> None:
    limits = {"max_sessions": 2, "max_nodes": 4, "max_body": 4096, "max_in_flight": 2}
    async with endpoint(tokenizer, busy, settings=limits) as bench:
        status, answer = await chat(bench, messages=[{"role": "user", "content": "x" * 5000}])
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        codes = []
        for line in ("a", "b", "c"):
            status, answer = await chat(bench, messages=[{"role": "user", "content": line}])
            codes.append(answer["error"]["code"] if status != 200 else None)
        assert codes == [None, None, "session_full"]
        waiting = [asyncio.create_task(chat(bench, "busy")) for _ in range(2)]
        await bench.engine.until(lambda engine: engine.held == 2)
        assert (await chat(bench, "busy"))[1]["error"]["code"] == "too_many_requests"
        assert (await chat(bench, "third"))[1]["error"]["code"] == "too_many_sessions"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_unused_session_is_dropped_and_a_used_one_is_not(tokenizer: Any) -> None:
    async with endpoint(tokenizer, busy, settings={"idle": 1000.0}) as bench:
        asking = asyncio.create_task(chat(bench, "busy"))
        await bench.engine.until(lambda engine: engine.held == 1)
        await chat(bench, "old")
        await chat(bench, "young")
        bench.endpoint.sessions.find("young")
        for name in ("busy", "old"):
            found = bench.endpoint.sessions.get(name)
            assert found is not None
            found.used = time.monotonic() - 1001
        bench.endpoint.sessions.drop_idle()
        # it is waited for, and keeps nobody else
        assert bench.endpoint.sessions.get("busy") is not None
        asking.cancel()
        assert bench.endpoint.sessions.get("old") is None
        assert bench.endpoint.sessions.get("young") is not None


async def test_deleting_a_session_aborts_what_runs_in_it(tokenizer: Any) -> None:
    hold = lambda request: Reply("Hello there.", hold=asyncio.Event(), hold_after=1)
    async with endpoint(tokenizer, hold) as bench:
        asking = asyncio.create_task(chat(bench))
        await bench.engine.until(lambda engine: engine.held == 1)
        async with bench.http.delete(f"{bench.url}/sessions/s") as response:
            assert response.status == 200
        status, answer = await asking
        assert (status, answer["error"]["code"]) == (409, "request_aborted")
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
)
async def test_each_failure_has_its_code_and_says_whether_to_try_again(
    tokenizer: Any, fault: Fault, status: int, code: str, retry: str
) -> None:
    settings = {"timeout": 0.3} if fault.hang else {}
    plan = lambda request: fault if request.index == 0 else None
    config = {"retries": 0}
    async with endpoint(
        tokenizer, lambda request: "Hello there.", faults=plan, config=config, settings=settings
    ) as bench:
        url = f"{bench.url}/sessions/s/v1/chat/completions"
        async with bench.http.post(url, json={"messages": [USER]}) as response:
            body = await response.json()
            assert (response.status, body["error"]["code"], response.headers["x-should-retry"]) == (
                status,
                code,
                retry,
            )
        assert not bench.endpoint.sessions.find("s").failures  # their tracebacks hold requests
        if not fault.hang:
            assert (await chat(bench))[0] == 200  # one failure touches no other request
            assert len(await bench.trajectories(refused=fault.abort_after is not None)) == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/nowhere"},
        {"$ref": "http://127.0.0.1:9/x"},
        {"properties": {"a": {"pattern": "^(a+)+$"}}},
    ],
)
async def test_no_schema_of_a_tool_fails_a_request(tokenizer: Any, schema: Any) -> None:
    said = '<tool_call>{"name": "f", "arguments": {"a": "' + "a" * 40 + '!"}}</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    async with endpoint(tokenizer, lambda request: said) as bench:
        status, answer = await chat(bench, tools=[tool])
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "tool_calls")


async def test_what_is_not_served_is_said(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        assert (await bench.post("/v1/embeddings", {}))[0] == 404
        for path in ("/sessions/s/chat/completions", "/sessions/s/completions"):
            status, answer = await bench.post(path, {"messages": [USER]})
            assert (status, answer["error"]["code"]) == (404, "not_found")
            assert "/sessions/s/v1" in answer["error"]["message"]
        assert (await bench.get("/v1/models/none"))["error"]["code"] == "model_not_found"
        assert (await bench.get("/sessions/none/trace"))["error"]["code"] == "session_not_found"
        async with bench.http.post(
            f"{bench.url}/v1/chat/completions", data=b"{", headers=JSON
        ) as response:
            assert (await response.json())["error"]["code"] == "invalid_json"
        async with bench.http.get(f"{bench.url}/v1/chat/completions") as response:
            assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_each_request_is_one_line_of_the_log_without_keys_or_bodies(
    tokenizer: Any, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "toolroll.endpoint")
    owner = {"Authorization": f"Bearer {KEY}"}
    async with endpoint(tokenizer, lambda request: "Hello.", settings={"api_key": KEY}) as bench:
        body = {"messages": [{"role": "user", "content": "a-private-word"}]}
        await bench.post("/sessions/s/v1/chat/completions?token=a-query", body, **owner)
        await bench.post("/v1/chat/completions", {**body, "session_id": "in-the-body"}, **owner)
        await bench.post("/v1/chat/completions", body, **owner)
        unnamed = bench.endpoint.sessions.all()[-1].id
        await bench.post("/sessions/s/reward", {"reward": 1})
        async with bench.http.get(f"{bench.url}/sessions/s/trajectories", headers=owner):
            pass
        async with bench.http.get(URL(f"{bench.url}/a%0Ab", encoded=True), headers=owner):
            pass
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "toolroll.endpoint.http.app"
    ]
    expected = [
        "POST /sessions/s/v1/chat/completions 200 session=s",
        "POST /v1/chat/completions 200 session=in-the-body",
        f"POST /v1/chat/completions 200 session={unnamed}",
        "POST /sessions/s/reward 401 invalid_api_key session=s",
        "GET /sessions/s/trajectories 200 session=s",
        "GET /a%0Ab 404 not_found session=-",
    ]
    assert [line.rpartition(" ")[0].rpartition(" ")[0] for line in lines] == expected
    assert not any(
        secret in line for line in lines for secret in (KEY, "a-private-word", "a-query")
    )


async def test_the_trace_is_what_was_served_in_order(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: f"Reply {request.index}.") as bench:
        await chat(bench)
        await bench.post("/sessions/s/v1/completions", {"prompt": "One two", "max_tokens": 20})
        trace = (await bench.get("/sessions/s/trace"))["trace"]
        assert [entry["object"] for entry in trace] == ["chat.completion", "text_completion"]
        for entry, seen in zip(trace, bench.engine.log, strict=True):
            assert entry["prompt_token_ids"] == seen.input_ids.tolist()
            assert entry["completion_token_ids"] == seen.output_ids
