"""Refusals have the form of the request's dialect, and the same reasons in every dialect."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import anthropic_wire, responses_wire
from support.endpoints import endpoint
from support.listed_environment import TOOL
from yarl import URL

from toolroll.endpoint import EndpointSettings
from toolroll.endpoint.endpoint_settings import SamplingDefaults
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.requests.tool_choice import call_closer, call_grammar
from toolroll.rollout.engine.sampling_params import KNOWN
from toolroll.rollout.errors import UsageError
from toolroll.testing import Fault

FORMS = {
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/messages/responses": "messages",
    "/v1/v1/messages": "messages",
    "/anthropic/v1/messages": "messages",
    "/messages": "messages",
    "/v1/responses": "responses",
    "/v1/responses/messages": "responses",
    "/responses": "responses",
    "/v1/chat/completions": "chat",
    "/v1/completions": "chat",
    "/v1/models/a/messages": "chat",
    "/trajectories": "chat",
    "/nowhere": "chat",
    "": "chat",
}


async def test_the_path_after_the_session_gives_the_form(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        for session in ("messages", "responses", "x%2Fv1%2Fmessages", "models", "chat"):
            for path, form in FORMS.items():
                for whole in (path, f"/sessions/{session}{path}"):
                    dialect = bench.endpoint.dialect_of(whole)
                    expected = getattr(bench.endpoint, form)
                    assert type(dialect).refusal is type(expected).refusal, whole


@pytest.mark.parametrize("session", ["messages", "x%2Fv1%2Fmessages", "models"])
async def test_a_session_may_have_the_name_of_an_api(tokenizer: Any, session: str) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        for path in ("/v1/chat/completions", "/nowhere"):
            url = URL(f"{bench.url}/sessions/{session}{path}", encoded=True)
            async with bench.http.post(url, json={}) as response:
                assert list(await response.json()) == ["error"], path
                hint = f"/sessions/{session}/v1" if path == "/nowhere" else ""
                text = await response.text()
                assert ("base_url" in text) == bool(hint) and hint in text


USER: dict[str, Any] = {"role": "user", "content": "Hi"}
LONG = "word " * 100
OVERFLOWS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/v1/completions": {"prompt": LONG},
}
REPORTED = {
    "The input (64 tokens) is longer than the model's context length (64 tokens).": (64, 63),
    "Requested token count exceeds the model's maximum context length of 64 tokens. You requested "
    "a total of 72 tokens: 63 tokens from the input messages and 9 tokens for the completion.":
    (63, 55),
    "Input length (90 tokens) exceeds the maximum allowed length (70 tokens).": (90, 70),
    "The input is longer than the model's context length (64 tokens).": None,
    "Requested token count exceeds the model's maximum context length of 64 tokens.": None,
}  # fmt: skip


@pytest.mark.parametrize("reported", [None, *REPORTED])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", OVERFLOWS)
async def test_an_overflow_is_the_same_error_everywhere(
    tokenizer: Any, path: str, stream: bool, reported: str | None
) -> None:
    """Agents recognize the beginning of the message (tests/contract/test_overflow_clients.py)."""
    engine: dict[str, Any] = {"context_length": 64}
    if reported is not None:
        refusal = json.dumps({"error": {"message": reported}}).encode()
        engine = {"faults": lambda request: Fault(status=400, body=refusal)}
    async with endpoint(tokenizer, lambda request: "Hello.", **engine) as bench:
        status, answer = await bench.post(path, {**OVERFLOWS[path], "stream": stream})
        error = answer["error"]
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("prompt is too long")
        assert "maximum input length is" in error["message"]
        numbers = r"prompt is too long: (\d+) tokens > (\d+) maximum\. "
        match = re.match(numbers, error["message"])
        sizes = None if match is None else tuple(map(int, match.groups()))
        if reported is None:
            assert sizes is not None
            assert (sizes[0] > 100, sizes[1], bench.engine.log) == (True, 57, [])
        else:
            assert sizes == REPORTED[reported] and len(bench.engine.log) == 1
            assert reported in error["message"]


MALFORMED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {},
        {"messages": []},
        {"messages": [{"role": "function", "content": "x"}]},
        {"messages": [USER, {"role": "assistant", "content": "x"}]},
        {"messages": [USER], "continue_final_message": True},
        {"messages": [USER], "n": 1000},
        {"messages": [USER], "tool_choice": "required"},
        {"messages": [USER], "nothing": 1},
    ],
    "/v1/messages": [
        {"messages": [USER]},
        {"max_tokens": 1, "messages": [{"role": "user", "content": 7}]},
        {"max_tokens": 1, "messages": [USER, {"role": "assistant", "content": []}]},
        {"max_tokens": 1, "messages": [USER], "tool_choice": {"type": "any"}},
    ],
    "/v1/responses": [
        {"input": 7},
        {"input": []},
        {"input": [USER, {"type": "web_search_call"}]},
        {"input": [USER], "tool_choice": "required"},
        {"input": [USER], "previous_response_id": "resp_none"},
    ],
    "/v1/completions": [{}, {"prompt": ""}, {"prompt": [-1]}, {"prompt": "a", "n": 1000}],
}


def _kinds(folder: Path) -> list[str]:
    """The kinds of the lines of sessions in the journal."""
    lines = map(json.loads, (folder / "sessions.jsonl").read_text().splitlines())
    return [line["kind"] for line in lines if "kind" in line]


@pytest.mark.parametrize("path", MALFORMED)
async def test_a_refused_body_creates_no_session(tokenizer: Any, path: str, tmp_path: Path) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.", out=tmp_path) as bench:
        for at, body in enumerate(MALFORMED[path]):
            status, answer = await bench.post(f"/sessions/s{at}{path}", body)
            assert status in (400, 404), answer
        assert (await bench.get("/sessions"))["data"] == []
    assert _kinds(tmp_path) == []


async def test_requests_that_race_to_create_a_session_share_it(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: f"Hello {request.index}.") as bench:
        bodies = [{"messages": [{"role": "user", "content": f"{at}"}]} for at in range(8)]
        path = "/sessions/s/v1/chat/completions"
        answers = await asyncio.gather(*(bench.post(path, body) for body in bodies))
        assert [status for status, _ in answers] == [200] * 8
        assert len(await bench.trajectories()) == 8


TWICE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": [TOOL, TOOL]},
    "/v1/messages": {**anthropic_wire.HELLO, "tools": [anthropic_wire.LOOK] * 2},
    "/v1/messages/count_tokens": {"messages": [USER], "tools": [anthropic_wire.LOOK] * 2},
    "/v1/responses": {**responses_wire.HELLO, "tools": [responses_wire.LOOK] * 2},
}


@pytest.mark.parametrize("path", TWICE)
@pytest.mark.parametrize("choice", [None, "none"])
async def test_two_tools_of_one_name_are_refused(
    tokenizer: Any, path: str, choice: str | None
) -> None:
    given: Any = {"type": choice} if choice and "/messages" in path else choice
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        status, answer = await bench.post(path, {**TWICE[path], "tool_choice": given})
        error = answer["error"]
        assert (status, error["param"], error["type"]) == (400, "tools", "invalid_request_error")
        assert ("type" in answer) == ("/messages" in path)
        assert "'look'" in error["message"]


async def test_a_flattened_tool_may_not_have_the_name_of_another(tokenizer: Any) -> None:
    space = {"type": "namespace", "name": "eyes", "tools": [responses_wire.LOOK]}
    tools = [space, {**responses_wire.LOOK, "name": "eyes__look"}]
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        body = {**responses_wire.HELLO, "tools": tools}
        status, answer = await bench.post("/v1/responses", body)
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "'eyes__look'" in answer["error"]["message"]


async def test_a_null_is_a_field_that_is_not_set(tokenizer: Any) -> None:
    message = {**USER, "name": None}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [message], "tools": [TOOL], "n": None},
        "/v1/messages": {
            **anthropic_wire.HELLO,
            "messages": [message],
            "tools": [{**anthropic_wire.LOOK, "defer_loading": None}],
        },
        "/v1/responses": {
            "input": [message],
            "tools": [{**responses_wire.LOOK, "defer_loading": None}],
        },
    }
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        for path, body in bodies.items():
            status, answer = await bench.post(path, body)
            assert status == 200, answer


@pytest.mark.parametrize("stop", ["", [""], ["END", ""]])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_an_empty_stop_string_is_refused_by_its_name(
    tokenizer: Any, path: str, stop: str | list[str]
) -> None:
    chat: dict[str, Any] = {"messages": [USER]}
    name, body = {
        "/v1/chat/completions": ("stop", chat),
        "/v1/completions": ("stop", {"prompt": "Once"}),
        "/v1/messages": ("stop_sequences", {**chat, "max_tokens": 9}),
    }[path]
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        given = stop if name == "stop" else ["END", ""]
        status, answer = await bench.post(path, {**body, name: given})
        assert status == 400
        assert f"{name}: a stop string must not be empty" in answer["error"]["message"]
        assert ("type" in answer) == (path == "/v1/messages")
        assert bench.engine.log == []


WRONG_DEFAULTS: list[tuple[str, dict[str, Any]]] = [
    ("max_new_tokens", {"max_new_tokens": "x"}),
    ("max_new_tokens", {"max_new_tokens": 0}),
    ("stop", {"stop": 5}),
    ("stop", {"stop": [""]}),
    ("stop_token_ids", {"stop_token_ids": 5}),
    ("stop_token_ids[0]", {"stop_token_ids": ["a"]}),
    ("temperature", {"temperature": -1}),
    ("logit_bias.a", {"logit_bias": {"a": 1}}),
    ("json_schema", {"json_schema": {"type": "object"}}),
]


@pytest.mark.parametrize(("name", "params"), WRONG_DEFAULTS)
async def test_a_default_with_a_wrong_value_is_refused_where_it_is_set(
    tokenizer: Any, name: str, params: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=re.escape(name)):
        EndpointSettings(sampling_params=params)
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        body = {"session_id": "s", "sampling_params": params}
        status, answer = await bench.post("/sessions", body)
        assert (status, answer["error"]["code"]) == (400, "invalid_value")
        assert answer["error"]["param"].startswith(f"sampling_params.{name}")
        assert len(bench.endpoint.sessions) == 0


async def test_defaults_are_sent_as_they_are_set(tokenizer: Any) -> None:
    async with endpoint(
        tokenizer, lambda request: "Hello.", settings={"sampling_params": {"top_k": 5}}
    ) as bench:
        params = {"stop": "END", "logit_bias": {"7": 1.5}, "max_new_tokens": 9, "min_p": None}
        await bench.post("/sessions", {"session_id": "s", "sampling_params": params})
        status, _ = await bench.post("/sessions/s/v1/chat/completions", {"messages": [USER]})
        assert status == 200
        [entry] = bench.engine.log
        sent = dict(entry.sampling_params)
        assert sent.items() >= {"top_k": 5, "stop": "END", "logit_bias": {"7": 1.5}}.items()
        assert sent["max_new_tokens"] == 9
        assert "min_p" not in sent


def test_every_parameter_of_sglang_but_n_can_be_a_default() -> None:
    assert set(SamplingDefaults.model_fields) == KNOWN - {"n"}


CALL: dict[str, Any] = {"id": "c", "type": "function"}
FUNCTION = {"name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("name", "call", "choice"),
    [
        ("messages[1].tool_calls[0].type", {**CALL, "type": "custom", "function": FUNCTION}, {}),
        ("messages[1].tool_calls[0].content", {**CALL, "content": 1, "function": FUNCTION}, {}),
        ("tool_choice.function.extra", {**CALL, "function": FUNCTION}, {"extra": 1}),
        # what client libraries add on their own
        (None, {"function": {**FUNCTION, "extra": None}, "id": "c", "index": 0, "extra": ""}, {}),
    ],
)
async def test_no_field_with_a_meaning_is_ignored(
    tokenizer: Any, name: str | None, call: dict[str, Any], choice: dict[str, Any]
) -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": "seen"}
    body = {
        "messages": [USER, {"role": "assistant", "tool_calls": [call]}, result],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look", **choice}},
    }
    reply = '<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call>'
    async with endpoint(tokenizer, lambda request: reply) as bench:
        status, answer = await bench.post("/v1/chat/completions", body)
        assert (status, answer.get("error", {}).get("param")) == (400 if name else 200, name)


def test_a_format_without_a_grammar_is_refused() -> None:
    for ask in (
        lambda: call_grammar("pythonic", ["look"], several=False),
        lambda: call_closer("llama3"),
    ):
        with pytest.raises(ApiError) as caught:
            ask()
        assert caught.value.status == 400
