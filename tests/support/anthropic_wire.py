"""A client of Anthropic's Messages without the SDK."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from support.endpoints import Bench
from support.listed_environment import TOOL

PATH = "/sessions/s/v1/messages"
LOOK: dict[str, Any] = {
    "name": TOOL["function"]["name"],
    "description": TOOL["function"]["description"],
    "input_schema": TOOL["function"]["parameters"],
}
HELLO: dict[str, Any] = {
    "model": "m",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Hi"}],
}


async def events_of(bench: Bench, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream. Check that each event is named after its type."""
    async with bench.http.post(bench.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    found = []
    for block in filter(None, text.split("\n\n")):
        name, _, data = block.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events add up to."""
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                _add(message["content"][event["index"]], event["delta"])
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    for block in message["content"]:
        if "partial" in block:
            block["input"] = json.loads(block.pop("partial"))
    assert events[-1]["type"] == "message_stop"
    return message


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        block["partial"] = block.get("partial", "") + delta["partial_json"]
        return
    name = delta["type"].removesuffix("_delta")
    block[name] += delta[name]


async def answer_of(
    joined: Callable[[list[dict[str, Any]]], dict[str, Any]],
    bench: Bench,
    body: dict[str, Any],
    *,
    path: str,
    stream: bool,
) -> dict[str, Any]:
    """Send a request. `joined` makes an answer of the events of a stream."""
    if stream:
        return joined(await events_of(bench, path, body))
    status, answer = await bench.post(path, body)
    assert status == 200, answer
    return answer


ask = partial(answer_of, message_of)
