"""JSON that is nested deep, in requests and in what the model says: it is refused in the dialect's
form, or served as text, and never fails the endpoint.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import anthropic_wire, responses_wire
from support.endpoints import Bench, endpoint
from support.listed_environment import TOOL

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
HOLE = "@hole@"
DEPTHS = (100, *range(193, 202), *range(245, 256), 1000, 1030, 50_000)


def nested(depth: int) -> str:
    """A JSON object that is nested `depth` levels."""
    return '{"a":' + "[" * (depth - 1) + '"bottom"' + "]" * (depth - 1) + "}"


def _chat(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    called = {"id": "c", "type": "function", "function": function}
    reply = {"role": "assistant", "content": None, "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": "c", "content": "seen"}
    return {"messages": [USER, reply, result], "tools": [TOOL]}


def _messages() -> dict[str, Any]:
    used = {"type": "tool_use", "id": "c", "name": "look", "input": HOLE}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "seen"}
    return {
        **anthropic_wire.HELLO,
        "messages": [
            USER,
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ],
        "tools": [anthropic_wire.LOOK],
    }


def _responses(arguments: str) -> dict[str, Any]:
    called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "c", "output": "seen"}
    return {"input": [USER, called, result], "tools": [responses_wire.LOOK]}


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
INPUTS: list[tuple[str, dict[str, Any], bool]] = [
    (CHAT, _chat(HOLE), False),
    (CHAT, _chat(HOLE), True),
    (MESSAGES, _messages(), False),
    (MESSAGES + "/count_tokens", _messages(), False),
    (RESPONSES, _responses(HOLE), True),
]
"""A path, a body with a hole, and whether what fills the hole is text."""
ELSEWHERE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [USER], "tools": [{**TOOL, "x": HOLE}]}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"x": HOLE}}),
    (CHAT, {"messages": [USER], "metadata": HOLE}),
    (MESSAGES, {**anthropic_wire.HELLO, "tools": [{"name": "look", "input_schema": HOLE}]}),
    (MESSAGES, {**anthropic_wire.HELLO, "metadata": {"user_id": HOLE}}),
    (RESPONSES, {"input": "Hi", "tools": [{**responses_wire.LOOK, "parameters": HOLE}]}),
    (RESPONSES, {"input": "Hi", "metadata": HOLE}),
    (RESPONSES, {"input": "Hi", "client_metadata": {"x": HOLE}}),
    ("/v1/completions", {"prompt": "Hi", "metadata": HOLE}),
    ("/tokenize", {"messages": [USER], "tools": [{**TOOL, "x": HOLE}]}),
    ("/sessions", {"sampling_params": {"stop": HOLE}}),
    ("/sessions/s/reward", {"reward": 1, "info": HOLE}),
]


def _filled(body: dict[str, Any], depth: int, *, text: bool) -> bytes:
    filling = json.dumps(nested(depth)) if text else nested(depth)
    return json.dumps(body).replace(json.dumps(HOLE), filling).encode()


async def _post(bench: Bench, path: str, body: bytes) -> tuple[int, str, Any]:
    headers = {"Content-Type": "application/json"}
    async with bench.http.post(bench.url + path, data=body, headers=headers) as response:
        raw = await response.text()
    return response.status, raw, json.loads(raw.partition("data: ")[2].partition("\n")[0] or raw)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "text"), INPUTS)
async def test_arguments_of_any_depth_are_shown_or_refused(
    tokenizer: Any, path: str, body: dict[str, Any], text: bool, stream: bool
) -> None:
    more = {} if path.endswith("count_tokens") else {"stream": stream}
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        for depth in DEPTHS:
            shown = len(bench.engine.log)
            status, raw, answer = await _post(
                bench, f"/sessions/s{path}", _filled({**body, **more}, depth, text=text)
            )
            if status == 200:
                assert "error" not in raw or '"error":null' in raw, raw
                for entry in bench.engine.log[shown:]:
                    prompt = bench.served.template.encoder.decode(entry.input_ids)
                    assert "bottom" in prompt
                continue
            assert status == 400 and depth >= 180, (depth, answer)
            assert ("type" in answer) == path.startswith(MESSAGES)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ELSEWHERE)
async def test_no_part_of_a_body_fails_the_endpoint(
    tokenizer: Any, path: str, body: dict[str, Any], stream: bool, tmp_path: Any
) -> None:
    more = {"stream": True} if stream and path in (CHAT, MESSAGES, RESPONSES) else {}
    async with endpoint(tokenizer, lambda request: "Hello.", out=tmp_path) as bench:
        await bench.post("/sessions", {"session_id": "s"})
        where = f"/sessions/s{path}" if path in (CHAT, MESSAGES, RESPONSES) else path
        for depth in DEPTHS:
            status, raw, answer = await _post(
                bench, where, _filled({**body, **more}, depth, text=False)
            )
            assert status in (200, 201, 400), (depth, answer)
            assert "internal_error" not in raw, depth
            if more and status == 200:
                assert any(end in raw for end in ("[DONE]", "message_stop", "response.completed"))


@pytest.mark.parametrize(
    ("depth", "stream"),
    [
        *((depth, stream) for depth in (100, 195, 196, 201, 248, 253) for stream in (False, True)),
        (1030, False),
    ],
)
async def test_deep_arguments_of_the_model_come_back_unchanged(
    tokenizer: Any, depth: int, stream: bool
) -> None:
    said = [f'<tool_call>{{"name": "look", "arguments": {nested(depth)}}}</tool_call>', "Done."]
    async with endpoint(tokenizer, lambda request: said[request.call]) as bench:
        body = {**anthropic_wire.HELLO, "max_tokens": 30_000, "tools": [anthropic_wire.LOOK]}
        path = anthropic_wire.PATH
        first = await anthropic_wire.ask(bench, body, path=path, stream=stream)
        uses = [block for block in first["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "seen"} for block in uses
        ]
        history = [
            USER,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": results or "Go on."},
        ]
        await anthropic_wire.ask(bench, {**body, "messages": history}, path=path, stream=stream)
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2
