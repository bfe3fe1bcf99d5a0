"""Chat completions through the real `openai` SDK, judged by the engine's log."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError
from support.episodes import call
from support.listed_environment import TOOL
from support.served import USER, serve, system, user

TOOLS: Any = [TOOL]


def _results(message: Any) -> list[Any]:
    """A result for each call of an SDK's message."""
    return [
        {
            "role": "tool",
            "tool_call_id": tool_call.id,
            "content": f"seen {tool_call.function.arguments}",
        }
        for tool_call in message.tool_calls or ()
    ]


async def test_a_conversation_with_tools_is_one_trajectory() -> None:
    replies = ["Let me look." + call(at="x"), call(at="y") + call(at="z"), "All seen."]
    async with serve(replies, split="random") as bench:
        create: Any = bench.client().chat.completions.create
        messages: list[Any] = [system("Be brief."), user("Look around. <|end|>")]
        reply: Any = None
        for finish_reason in ("tool_calls", "tool_calls", "stop"):
            reply = await create(model="any", messages=messages, tools=TOOLS)
            assert reply.choices[0].finish_reason == finish_reason
            message = reply.choices[0].message  # the SDK's object, as agents do
            messages += [message, *_results(message)]
        assert reply.choices[0].message.content == "All seen."
        cached = reply.usage.prompt_tokens_details.cached_tokens
        assert cached == bench.engine.log[2].cached_tokens > 200
        trajectory = await bench.one_trajectory(turns=3)
        assert trajectory["fork_reason"] is None
        ids, start = trajectory["input_ids"], trajectory["turns"][2]["start"]
        assert (ids[:start], ids[start:]) == (reply.prompt_token_ids, reply.choices[0].token_ids)


@pytest.mark.parametrize("by", ["path", "header", "body"])
async def test_the_session_is_chosen_by_path_header_or_body(by: str) -> None:
    async with serve() as bench:
        headers = {"x-session-id": "one"} if by == "header" else {}
        client = bench.client("one" if by == "path" else None, default_headers=headers)
        body = {"session_id": "one"} if by == "body" else {}
        create: Any = client.chat.completions.create
        await create(model="m", messages=[USER], extra_body=body)
        assert [entry.routing_key for entry in bench.engine.log] == ["one"]
        assert len(await bench.trajectories("one")) == 1


async def test_n_answers_are_siblings() -> None:
    async with serve(lambda request: f"Answer {request.index}." + call(at="x")) as bench:
        create: Any = bench.client().chat.completions.create
        reply = await create(model="m", messages=[USER], tools=TOOLS, n=3)
        messages = [choice.message for choice in reply.choices]
        assert len({message.content for message in messages}) == 3
        assert len({message.tool_calls[0].id for message in messages}) == 3
        chosen = [USER, messages[1], *_results(messages[1])]
        await create(model="m", messages=chosen, tools=TOOLS)
        trajectories = await bench.trajectories()
        assert sorted(len(each["turns"]) for each in trajectories) == [1, 1, 2]


async def test_reward_and_delete() -> None:
    async with serve() as bench:
        await bench.chat(USER)
        rewarded = await bench.send("/sessions/s/reward", {"reward": 0.5})
        assert rewarded == {"session_id": "s", "reward": 0.5}
        assert (await bench.get("/sessions/s/trajectories"))["reward"] == 0.5
        assert await bench.delete() == 200
        assert (await bench.get("/sessions/s/trajectories"))["error"]["code"] == "session_not_found"


async def test_an_overflow_is_openais_own_error_and_drops_nothing() -> None:
    async with serve(context_length=64) as bench:
        create: Any = bench.client(max_retries=2).chat.completions.create
        reply = await create(model="m", messages=[USER])
        longer = [USER, reply.choices[0].message, user("word " * 100)]
        with pytest.raises(BadRequestError) as caught:
            await create(model="m", messages=longer)
        assert caught.value.code == "context_length_exceeded"
        assert len(bench.engine.log) == len(await bench.trajectories()) == 1
