"""The form of a refusal is that of the request's dialect, and its reason is the same in each; how
much a client may ask for, when a session ends, and what each failure says.
"""

import asyncio
import json
import re
from typing import Any

import pytest
from support.served import CHAT, MESSAGES, RESPONSES, TEXT, USER, in_session, serve, user
from yarl import URL

from toolroll.testing import Fault, PolicyRequest, Reply

PATH = in_session(CHAT)
BODY = {"messages": [USER]}
FORMS = {
    "/v1/messages": "messages",
    "/v1/messages/responses": "messages",
    "/anthropic/v1/messages": "messages",
    "/v1/responses/messages": "responses",
    "/v1/completions": "chat",
    "/v1/models/a/messages": "chat",
    "/nowhere": "chat",
    "": "chat",
}


async def test_the_path_after_the_session_gives_the_form() -> None:
    """Whatever the name of the session is."""
    async with serve() as bench:
        for session in ("messages", "responses", "x%2Fv1%2Fmessages", "models", "chat"):
            for path, form in FORMS.items():
                for whole in (path, in_session(path, session)):
                    dialect = bench.endpoint.dialect_of(whole)
                    expected = getattr(bench.endpoint, form)
                    assert type(dialect).refusal is type(expected).refusal, whole
            for path in (CHAT, "/nowhere"):
                url = URL(bench.url + in_session(path, session), encoded=True)
                async with bench.http.post(url, json={}) as response:
                    text = await response.text()
                assert list(json.loads(text)) == ["error"], path
                assert ("base_url" in text) == (path == "/nowhere")
                assert path == CHAT or f"/sessions/{session}/v1" in text


LONG = "word " * 100
OVERFLOWS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [user(LONG)]},
    MESSAGES: {"max_tokens": 9, "messages": [user(LONG)]},
    RESPONSES: {"input": LONG},
    TEXT: {"prompt": LONG},
}
REPORTED = {
    "The input (64 tokens) is longer than the model's context length (64 tokens).": (64, 63),
    "Requested token count exceeds the model's maximum context length of 64 tokens. You requested "
    "a total of 72 tokens: 63 tokens from the input messages and 9 tokens for the completion.": (
        63,
        55,
    ),
    "Input length (90 tokens) exceeds the maximum allowed length (70 tokens).": (90, 70),
    "The input is longer than the model's context length (64 tokens).": None,
    "Requested token count exceeds the model's maximum context length of 64 tokens.": None,
}
"""What the engine says, and the size of the prompt and of the largest prompt in it."""


@pytest.mark.parametrize("reported", [None, *REPORTED])
async def test_an_overflow_is_the_same_error_everywhere(reported: str | None) -> None:
    """Agents recognize the beginning of the message (tests/contract/test_clients.py)."""
    engine: dict[str, Any] = {"context_length": 64}
    if reported is not None:
        refusal = json.dumps({"error": {"message": reported}}).encode()
        engine = {"faults": lambda request: Fault(status=400, body=refusal)}
    async with serve(**engine) as bench:
        for path, body in OVERFLOWS.items():
            for stream in (False, True):
                status, answer = await bench.post(path, {**body, "stream": stream})
                error = answer["error"]
                assert (status, error["type"]) == (400, "invalid_request_error")
                assert error["code"] == "context_length_exceeded"
                assert error["message"].startswith("prompt is too long")
                assert "maximum input length is" in error["message"]
                numbers = r"prompt is too long: (\d+) tokens > (\d+) maximum\. "
                match = re.match(numbers, error["message"])
                sizes = None if match is None else tuple(map(int, match.groups()))
                if reported is not None:
                    assert sizes == REPORTED[reported]
                    assert reported in error["message"]
                else:
                    assert sizes is not None and sizes[0] > 100 and sizes[1] == 57
        assert len(bench.engine.log) == (0 if reported is None else 2 * len(OVERFLOWS))


HINTS = {
    "/v1/assistants": "/v1/chat/completions",
    "/chat/completions": "must end with /v1,",
    "/v1/chat/completions/": "must end with /v1,",
    "/sessions/s/chat/completions": "must end with /sessions/s/v1,",
    "/session/s/v1/responses": "must end with /sessions/s/v1,",
    "/v1/sessions/s/chat/completions": "must end with /sessions/s/v1,",
    "/sessions/s/v1/v1/messages": "SDK with /sessions/s.",
    "/v1/v1/messages": "SDK with the port.",
    "/nowhere": "GET /v1/models",
}


async def test_an_unknown_route_names_the_routes_that_are_served() -> None:
    async with serve() as bench:
        error: Any = {}
        for path, hint in HINTS.items():
            status, answer = await bench.post(path, BODY)
            kind = "not_found_error" if "messages" in path else "invalid_request_error"
            error = answer["error"]
            assert (status, error["code"], error["type"]) == (404, "not_found", kind)
            assert hint in error["message"] and path in error["message"]
        for path in error["message"].partition("POST ")[2].partition(";")[0].split(", "):
            assert (await bench.post(path, {}))[0] in (201, 400), path
        for path in error["message"].partition("GET ")[2].partition(";")[0].split(", "):
            path = path.replace("MODEL", bench.endpoint.model_name)
            async with bench.http.get(bench.url + path) as response:
                assert response.status == 200, path


async def test_another_model_or_method_is_refused() -> None:
    async with serve() as bench:
        assert (await bench.get("/v1/models/none"))["error"]["code"] == "model_not_found"
        error = (await bench.get(TEXT))["error"]
        assert error["code"] == "method_not_allowed" and "use POST" in error["message"]


def busy(request: PolicyRequest) -> Reply:
    """Hold the answer to the session "busy" after its first token."""
    hold = asyncio.Event() if request.routing_key == "busy" else None
    return Reply("Hello.", hold=hold, hold_after=1)


async def test_limits_have_clear_errors_and_an_end_aborts() -> None:
    limits = {"max_sessions": 2, "max_nodes": 4, "max_body": 4096, "max_in_flight": 2}
    async with serve(busy, settings=limits) as bench:
        refusal = await bench.refusal(PATH, {"messages": [user("x" * 5000)]})
        assert refusal[:2] == (413, "body_too_large")
        for text in "ab":
            await bench.ask(user(text))
        assert (await bench.refusal(PATH, BODY))[1] == "session_full"
        path = in_session(CHAT, "busy")
        waiting = [asyncio.create_task(bench.refusal(path, BODY)) for _ in range(2)]
        await bench.engine.until(lambda engine: engine.held == 2)
        assert (await bench.refusal(path, BODY))[1] == "too_many_requests"
        assert (await bench.refusal(in_session(CHAT, "t"), BODY))[1] == "too_many_sessions"
        assert await bench.delete("busy") == 200
        for refused in await asyncio.gather(*waiting):
            assert refused[:2] == (409, "request_aborted")
        ended = lambda engine: all(entry.finished is not None for entry in engine.log)
        await bench.engine.until(ended)
        assert [entry.aborted for entry in bench.engine.log[-2:]] == [True, True]


async def test_an_unused_session_is_dropped_and_a_used_one_is_not() -> None:
    """The busy one is waited for, and keeps nobody else. Its idle time starts at its end."""
    go_on = asyncio.Event()

    def policy(request: PolicyRequest) -> Reply:
        return Reply("Hello.", hold=go_on if request.routing_key == "busy" else None, hold_after=1)

    async with serve(policy, settings={"idle": 1000.0}) as bench:
        waiting = asyncio.create_task(bench.ask(USER, session="busy"))
        await bench.engine.until(lambda engine: engine.held == 1)
        for name in ("old", "young"):
            await bench.ask(USER, session=name)
        for live in bench.endpoint.sessions.all():
            live.used -= 0.0 if live.id == "young" else 1001.0
        for _ in range(2):
            bench.endpoint.sessions.drop_idle()
            assert sorted(bench.ids()) == ["busy", "young"]
            go_on.set()
            await waiting


@pytest.mark.parametrize(
    ("fault", "status", "code", "retry"),
    [
        (Fault(status=503, body=b'{"error":"busy"}'), 503, "engine_overloaded", "true"),
        (Fault(status=400, body=b'{"error":{"message":"no"}}'), 400, "engine_refused", "false"),
        (Fault(status=500, body=b"boom"), 502, "engine_error", "true"),
        (Fault(drop=True), 502, "engine_error", "true"),
        (Fault(abort_after=1), 503, "engine_aborted", "true"),
        (Fault(hang=60), 504, "timeout", "true"),
    ],
    ids=["busy", "refused", "error", "dropped", "aborted", "hanging"],
)
async def test_each_failure_has_its_code(fault: Fault, status: int, code: str, retry: str) -> None:
    settings = {"timeout": 0.3} if fault.hang else {}
    faults = lambda request: fault if request.index == 0 else None
    async with serve(faults=faults, config={"retries": 0}, settings=settings) as bench:
        async with bench.http.post(bench.url + PATH, json=BODY) as response:
            error = (await response.json())["error"]
            answer = (response.status, error["code"], response.headers["x-should-retry"])
            assert answer == (status, code, retry)
        live = bench.endpoint.sessions.find("s")
        assert not live.failures  # their tracebacks hold requests
        assert live.pending.all() == []  # no retry joins it, and it holds its conversation
        if not fault.hang:
            await bench.ask(USER)  # one failure touches no other request
            assert len(await bench.trajectories(refused=fault.abort_after is not None)) == 1
