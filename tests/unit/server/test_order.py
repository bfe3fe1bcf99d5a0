"""Text and calls have the order in which the model wrote them, with and without `stream`."""

from __future__ import annotations

from typing import Any

import pytest
from support import anthropic_wire, responses_wire
from support.endpoints import endpoint
from support.episodes import call

REPLY = (
    f"<think>\nHm\n</think>\n\nBefore. {call(at='a')} Between. "
    f'<tool_call>{{"name": "look", "arguments": oops}}</tool_call>{call(at="b")} After.'
)
ORDER = ["thought", "text", "call", "text", "call", "call", "text"]
KINDS = {
    "thinking": "thought",
    "text": "text",
    "tool_use": "call",
    "reasoning": "thought",
    "message": "text",
    "function_call": "call",
}
USER = {"role": "user", "content": "Hi"}
WIRES: dict[str, Any] = {
    "/sessions/{}/v1/messages": (
        anthropic_wire,
        {"max_tokens": 400, "messages": [USER], "tools": [anthropic_wire.LOOK]},
    ),
    "/sessions/{}/v1/responses": (
        responses_wire,
        {"input": [USER], "tools": [responses_wire.LOOK]},
    ),
}


def shown(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks or items of an answer, without the ids, which name the answer."""
    parts = answer["content"] if "content" in answer else answer["output"]
    return [
        {name: value for name, value in part.items() if name not in ("id", "call_id")}
        for part in parts
    ]


@pytest.mark.parametrize("path", WIRES)
async def test_both_forms_of_an_answer_have_the_order_of_the_model_and_can_be_continued(
    tokenizer: Any, path: str
) -> None:
    wire, body = WIRES[path]
    async with endpoint(tokenizer, lambda request: REPLY) as bench:
        plain = await wire.ask(bench, body, path=path.format("plain"), stream=False)
        stream = await wire.ask(bench, body, path=path.format("stream"), stream=True)
        assert shown(plain) == shown(stream)
        assert [KINDS[part["type"]] for part in shown(plain)] == ORDER
        for session, answer in (("plain", plain), ("stream", stream)):
            again = {**body, **continued(body, answer)}
            await wire.ask(bench, again, path=path.format(session), stream=False)
            [trajectory] = await bench.trajectories(session)
            assert len(trajectory["turns"]) == 2


def continued(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The body of the next request, with results for all calls."""
    if "content" in answer:
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "seen"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        reply = {"role": "assistant", "content": answer["content"]}
        return {"messages": [*body["messages"], reply, {**USER, "content": results or "Go on"}]}
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return {"input": [*body["input"], *answer["output"], *(outputs or [USER])]}
