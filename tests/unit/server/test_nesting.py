"""JSON that is nested deep, in requests and in what the model says: it is refused in the dialect's
form, or served as text, and never fails the endpoint.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from support.anthropic_wire import HELLO, LOOK
from support.client_fields import FIELDS, HOLE
from support.dialect_bodies import body_of
from support.served import CHAT, JSON, MESSAGES, RESPONSES, USER, ServedBench, in_session, serve
from support.wires import ask, continued

DEPTHS = (100, *range(193, 202), *range(245, 256), 1000, 1030, 50_000)


def nested(depth: int) -> str:
    """A JSON object that is nested `depth` levels."""
    return '{"a":' + "[" * (depth - 1) + '"bottom"' + "]" * (depth - 1) + "}"


async def post(
    bench: ServedBench, path: str, body: dict[str, Any], depth: int, *, text: bool = False
) -> tuple[int, str]:
    """Send `body` with JSON of this depth in its hole, as JSON or as text."""
    filling = json.dumps(nested(depth)) if text else nested(depth)
    data = json.dumps(body).replace(json.dumps(HOLE), filling).encode()
    async with bench.http.post(bench.url + path, data=data, headers=JSON) as response:
        return response.status, await response.text()


def history(arguments: str) -> list[dict[str, Any]]:
    calls = [{"id": "c", "function": {"name": "look", "arguments": arguments}}]
    reply = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "c", "content": "seen"}
    return [{"role": "system", "content": "S"}, USER, reply, result]


OF_CHAT = body_of("chat", history(HOLE), stream=False)
OF_MESSAGES = body_of("messages", history("{}"), stream=False)
OF_MESSAGES["messages"][1]["content"][0]["input"] = HOLE
OF_RESPONSES = body_of("responses", history(HOLE), stream=False)
INPUTS = {
    "chat, as JSON": (CHAT, OF_CHAT, False),
    "chat, as text": (CHAT, OF_CHAT, True),
    "messages": (MESSAGES, OF_MESSAGES, False),
    "messages, counted": (f"{MESSAGES}/count_tokens", OF_MESSAGES, False),
    "responses": (RESPONSES, OF_RESPONSES, True),
}
"""A path, a body with a hole for arguments, and whether what fills the hole is text."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", INPUTS)
async def test_arguments_of_any_depth_are_shown_or_refused(name: str, stream: bool) -> None:
    path, body, text = INPUTS[name]
    async with serve() as bench:
        for depth in DEPTHS:
            served = len(bench.engine.log)
            body = {**body, "stream": stream and not path.endswith("count_tokens")}
            status, answer = await post(bench, in_session(path), body, depth, text=text)
            if status == 200:
                assert "error" not in answer or '"error":null' in answer, answer
                for request in range(served, len(bench.engine.log)):
                    assert "bottom" in bench.prompt(request)
                continue
            assert status == 400 and depth >= 180, (depth, answer)
            first = answer.partition("data: ")[2].partition("\n")[0] or answer
            assert ("type" in json.loads(first)) == path.startswith(MESSAGES)


@pytest.mark.parametrize(
    ("depth", "stream"),
    [*itertools.product((100, 195, 196, 201, 248, 253), (False, True)), (1030, False)],
)
async def test_deep_arguments_of_the_model_come_back_unchanged(depth: int, stream: bool) -> None:
    reply = f'<tool_call>{{"name": "look", "arguments": {nested(depth)}}}</tool_call>'
    body = {**HELLO, "max_tokens": 30_000, "tools": [LOOK]}
    async with serve([reply, "Done."]) as bench:
        first = await ask(bench, body, stream=stream)
        await ask(bench, continued(body, first), stream=stream)
        await bench.one_trajectory(turns=2)


@pytest.mark.parametrize("depth", [193, 195, 197, 199])
async def test_no_part_of_a_body_fails_the_endpoint(depth: int, tmp_path: Path) -> None:
    async with serve(out=tmp_path, settings={"verify": "off"}) as bench:
        await bench.create("s0")
        for path, body in FIELDS.values():
            status, answer = await post(bench, path.format("s0"), body, depth)
            assert status in (200, 201, 400, 404), answer
            assert "internal_error" not in answer, body
