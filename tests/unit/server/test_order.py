"""Text and calls have the order in which the model wrote them, with and without `stream`."""

from __future__ import annotations

from typing import Any

import pytest
from support import anthropic_wire, responses_wire
from support.endpoints import endpoint
from support.episodes import call

REPLIES = [
    f"Before. {call(at='a')} After.",
    f"{call(at='a')}\n{call(at='b')} After.",
    f"<think>\nHm\n</think>\n\nBefore. {call(at='a')} Between. {call(at='b')} After.",
    f"Before. {call(at='a')}",
    f'Before. <tool_call>{{"name": "look", "arguments": oops}}</tool_call> After. {call(at="b")}',
    "Hello.",
    "",
]
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


def kinds(parts: list[dict[str, Any]]) -> list[str]:
    return [part["type"] for part in parts]


@pytest.mark.parametrize("path", WIRES)
@pytest.mark.parametrize("reply", REPLIES)
async def test_a_plain_answer_has_the_blocks_of_the_stream_and_can_be_continued(
    tokenizer: Any, path: str, reply: str
) -> None:
    wire, body = WIRES[path]
    async with endpoint(tokenizer, lambda request: reply) as bench:
        plain = await wire.ask(bench, body, path=path.format("plain"), stream=False)
        stream = await wire.ask(bench, body, path=path.format("stream"), stream=True)
        assert shown(plain) == shown(stream)
        for session, answer in (("plain", plain), ("stream", stream)):
            again = {**body, **continued(body, answer)}
            if not (answer.get("content") or answer.get("output")):
                continue  # Messages has no block for an empty reply, so it cannot be sent back
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


async def test_the_order_is_that_of_the_model(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: REPLIES[2]) as bench:
        found = {}
        for path, (wire, body) in WIRES.items():
            answer = await wire.ask(bench, body, path=path.format("s"), stream=False)
            found[path] = kinds(shown(answer))
    messages, responses = found.values()
    assert messages == ["thinking", "text", "tool_use", "text", "tool_use", "text"]
    assert responses == [
        "reasoning", "message", "function_call", "message", "function_call", "message",
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_is_the_one_that_was_sent(tokenizer: Any, stream: bool) -> None:
    wire, body = WIRES["/sessions/{}/v1/responses"]
    async with endpoint(tokenizer, lambda request: REPLIES[0]) as bench:
        path = "/sessions/s/v1/responses"
        sent = await wire.ask(bench, body, path=path, stream=stream)
        assert await bench.get(f"{path}/{sent['id']}") == sent


async def test_a_reply_that_is_cut_has_the_same_states_in_both_forms(tokenizer: Any) -> None:
    ends = set()
    wire, body = WIRES["/sessions/{}/v1/responses"]
    after_call = len(tokenizer.encode(REPLIES[3], add_special_tokens=False))
    async with endpoint(tokenizer, lambda request: REPLIES[0]) as bench:
        for limit in (*range(1, after_call, 4), after_call):
            asked = {**body, "max_output_tokens": limit}
            path = f"/sessions/{limit}-{{}}/v1/responses"
            plain = await wire.ask(bench, asked, path=path.format("plain"), stream=False)
            streamed = await wire.ask(bench, asked, path=path.format("stream"), stream=True)
            assert plain["status"] == streamed["status"] == "incomplete"
            assert shown(plain) == shown(streamed)
            ends.add((plain["output"][-1]["type"], plain["output"][-1]["status"]))
    assert ends == {
        ("message", "incomplete"),
        ("function_call", "incomplete"),  # cut in the call
        ("function_call", "completed"),  # cut after it
    }
