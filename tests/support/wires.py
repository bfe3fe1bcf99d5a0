"""Requests in Anthropic's Messages and OpenAI's Responses, by the same functions for both."""

import json
from collections.abc import Callable
from typing import Any

from support import anthropic_wire, responses_wire
from support.client_scenario import FIRST, seen
from support.served import CHAT, MESSAGES, RESPONSES, TEXT, USER, ServedBench, in_session, user

WIRES: dict[str, Any] = {"messages": anthropic_wire, "responses": responses_wire}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    MESSAGES: anthropic_wire.HELLO,
    RESPONSES: responses_wire.HELLO,
    TEXT: {"prompt": "Hi"},
}
"""A request in each API."""


async def ask(
    bench: ServedBench, body: dict[str, Any], *, session: str = "s", stream: bool = False
) -> dict[str, Any]:
    """Return the message or the response, which may come as a stream."""
    name = "responses" if "input" in body else "messages"
    path = in_session(f"/v1/{name}", session)
    answer: dict[str, Any] = await WIRES[name].ask(bench, body, path=path, stream=stream)
    return answer


def continued(
    body: dict[str, Any],
    answer: dict[str, Any],
    result: Callable[[str], str] = lambda arguments: "seen",
) -> dict[str, Any]:
    """The body of the next request: with the answer, and results for all its calls."""
    if "content" in answer:
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": result(json.dumps(block["input"])),
            }
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        reply = {"role": "assistant", "content": answer["content"]}
        more = {"role": "user", "content": results or "Go on."}
        return {**body, "messages": [*body["messages"], reply, more]}
    outputs = [
        {
            "type": f"{item['type']}_output",
            "call_id": item["call_id"],
            "output": result(item.get("arguments", "")),
        }
        for item in answer["output"]
        if item["type"] in ("function_call", "custom_tool_call")
    ]
    first = [user(body["input"])] if isinstance(body["input"], str) else body["input"]
    return {**body, "input": [*first, *answer["output"], *(outputs or [user("Go on.")])]}


async def play(
    bench: ServedBench,
    name: str,
    *,
    stream: bool = False,
    change: Callable[[Any], Any] = lambda parts: parts,
    stored: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Play a tool loop, and return the last answer. `change` makes the messages or items that are
    sent. `stored`: send only the new items, with `previous_response_id`.
    """
    parts = "messages" if name == "messages" else "input"
    body: dict[str, Any] = {"model": "m", "tools": [WIRES[name].LOOK]}
    if name == "messages":
        body |= {"max_tokens": 1000, "system": FIRST[0]["content"]}
    else:
        body["instructions"] = FIRST[0]["content"]
    body |= {parts: [user(FIRST[1]["content"])], **more}
    while True:
        sent = body[parts]
        answer = await ask(bench, {**body, parts: change(sent)}, stream=stream)
        replied = answer["output"] if name == "responses" else answer["content"]
        if not any(part["type"] in ("tool_use", "function_call") for part in replied):
            return answer
        body = continued(body, answer, seen)
        if stored:
            new = body["input"][len(sent) + len(replied) :]
            body |= {"input": new, "previous_response_id": answer["id"]}
