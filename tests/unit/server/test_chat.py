"""Chat completions through the real `openai` SDK, judged by the engine's log."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError
from support.endpoints import endpoint
from support.episodes import call
from support.listed_environment import TOOL

TOOLS: Any = [TOOL]


async def test_a_conversation_with_tools_is_one_trajectory(tokenizer: Any) -> None:
    said = ["Let me look." + call(at="x"), call(at="y") + call(at="z"), "All seen."]
    async with endpoint(tokenizer, lambda request: said[request.call], split="random") as bench:
        client = bench.client()
        messages: list[Any] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look around. <|end|>"},
        ]
        reply: Any = None
        for turn in range(3):
            reply = await client.chat.completions.create(
                model="any", messages=messages, tools=TOOLS
            )
            message = reply.choices[0].message
            assert reply.choices[0].finish_reason == ("stop" if turn == 2 else "tool_calls")
            messages.append(message)  # the SDK's object, as agents do
            for wanted in message.tool_calls or ():
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": wanted.id,
                        "content": f"seen {wanted.function.arguments}",
                    }
                )
        assert reply.choices[0].message.content == "All seen."
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        assert (
            reply.usage.prompt_tokens_details.cached_tokens
            == bench.engine.log[2].cached_tokens
            > 200
        )
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 3
        assert trajectory["fork_reason"] is None
        extra: Any = reply
        assert trajectory["input_ids"][: trajectory["turns"][2]["start"]] == extra.prompt_token_ids
        assert (
            trajectory["input_ids"][trajectory["turns"][2]["start"] :] == extra.choices[0].token_ids
        )


@pytest.mark.parametrize("by", ["path", "header", "body"])
async def test_the_session_is_chosen_by_path_header_or_body(tokenizer: Any, by: str) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        client = bench.client(
            "one" if by == "path" else None,
            default_headers={"x-session-id": "one"} if by == "header" else {},
        )
        more: Any = {"extra_body": {"session_id": "one"}} if by == "body" else {}
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], **more
        )
        assert [entry.routing_key for entry in bench.engine.log] == ["one"]
        assert len(await bench.trajectories("one")) == 1


async def test_without_a_session_each_conversation_is_one(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        reply: Any = await bench.client(None).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}]
        )
        assert reply.choices[0].token_ids == bench.engine.log[0].output_ids
        [live] = bench.endpoint.sessions.all()
        assert len(await bench.trajectories(live.id)) == 1


async def test_n_answers_are_siblings(tokenizer: Any) -> None:
    async with endpoint(
        tokenizer, lambda request: f"Answer {request.index}." + call(at="x")
    ) as bench:
        client = bench.client()
        first: list[Any] = [{"role": "user", "content": "Hi"}]
        reply = await client.chat.completions.create(model="m", messages=first, tools=TOOLS, n=3)
        assert len({choice.message.content for choice in reply.choices}) == 3
        assert (
            len(
                {
                    choice.message.tool_calls[0].id
                    for choice in reply.choices
                    if choice.message.tool_calls
                }
            )
            == 3
        )
        chosen = reply.choices[1].message
        assert chosen.tool_calls
        answer: Any = {"role": "tool", "tool_call_id": chosen.tool_calls[0].id, "content": "seen"}
        await client.chat.completions.create(
            model="m",
            messages=[*first, chosen, answer],  # type: ignore[list-item]
            tools=TOOLS,
        )
        trajectories = await bench.trajectories()
        assert sorted(len(found["turns"]) for found in trajectories) == [1, 1, 2]


async def test_reward_and_delete(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        await bench.client().chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}]
        )
        assert await bench.post("/sessions/s/reward", {"reward": 0.5}) == (
            200,
            {"session_id": "s", "reward": 0.5},
        )
        assert (await bench.get("/sessions/s/trajectories"))["reward"] == 0.5
        async with bench.http.delete(f"{bench.url}/sessions/s") as response:
            assert response.status == 200
        assert (await bench.get("/sessions/s/trajectories"))["error"]["code"] == "session_not_found"


async def test_an_overflow_is_openais_own_error_and_keeps_what_was_there(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.", context_length=64) as bench:
        client = bench.client(max_retries=2)
        first: list[Any] = [{"role": "user", "content": "Hi"}]
        reply = await client.chat.completions.create(model="m", messages=first)
        longer = [*first, reply.choices[0].message, {"role": "user", "content": "word " * 100}]
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=longer)
        assert caught.value.code == "context_length_exceeded"
        assert len(bench.engine.log) == 1
        assert len(await bench.trajectories()) == 1
