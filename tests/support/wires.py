"""Requests in Anthropic's Messages and OpenAI's Responses, by the same functions for both."""

from __future__ import annotations

from typing import Any

from support import anthropic_wire, responses_wire
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


def continued(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The body of the next request: with the answer, and results for all its calls."""
    if "content" in answer:
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "seen"}
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
            "output": "seen",
        }
        for item in answer["output"]
        if item["type"] in ("function_call", "custom_tool_call")
    ]
    first = [user(body["input"])] if isinstance(body["input"], str) else body["input"]
    return {**body, "input": [*first, *answer["output"], *(outputs or [user("Go on.")])]}
