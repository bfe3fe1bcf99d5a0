"""Streams: the deltas are the message, whatever it says and however it is cut into tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.listed_environment import TOOL
from support.stream_chunks import joined, whole
from support.tiers import costly

from toolroll.parsers.formats.hermes import HermesParser
from toolroll.parsers.types import ParsedReply
from toolroll.testing import Fault, Reply

USER: Any = {"role": "user", "content": "Hi"}
PATH = "/sessions/s/v1/chat/completions"


async def events(
    bench: Bench,
    path: str = PATH,
    /,
    *,
    retry: int = 0,
    begun: Callable[[], object] = lambda: None,
    **asked: Any,
) -> list[Any]:
    """The events of a stream, the last one "[DONE]". `begun` is called when the first of them
    has come.
    """
    headers = {"x-stainless-retry-count": str(retry)} if retry else {}
    async with bench.http.post(
        bench.url + path, json={"stream": True, **asked}, headers=headers
    ) as response:
        assert response.status == 200, await response.text()
        text = await response.content.readany()
        begun()
        text += await response.read()
    data = [line.removeprefix(b"data: ") for line in text.split(b"\n\n") if line]
    assert data[-1] == b"[DONE]"
    return [orjson.loads(line) for line in data[:-1]]


async def streamed(bench: Bench, **asked: Any) -> list[Any]:
    """The events of a stream whose deltas are the message that is kept."""
    chunks = await events(bench, messages=[USER], **asked)
    [turn] = bench.endpoint.sessions.find("s").tree._turns.values()
    assert joined(chunks) == whole(turn[0].reply)
    return chunks


MARKERS = ["<", "<tool", "<tool_call>", "</tool_call>", "<think>", "</think>", "STOP", "ST", "{"]
PIECES = st.sampled_from(
    [*MARKERS, "Hello", " wörld 日本 🙂", "\n", "  ", call(at="é 🙂"), call(at="x")]
)


@costly(2)
@given(
    pieces=st.lists(PIECES, max_size=6),
    thought=st.booleans(),
    tools=st.booleans(),
    stop=st.booleans(),
    limit=st.sampled_from([None, 5]),
)
def test_the_deltas_are_the_message(
    tokenizer: Any, pieces: list[str], thought: bool, tools: bool, stop: bool, limit: int | None
) -> None:
    said = ("<think>\nA thought.\n</think>\n\n" if thought else "") + "".join(pieces)
    asked = {
        **({"tools": [TOOL]} if tools else {}),
        **({"stop": ["STOP"]} if stop else {}),
        **({"max_tokens": limit} if limit else {}),
    }

    async def compare() -> None:
        async with endpoint(tokenizer, lambda request: said, split="random") as bench:
            chunks = await streamed(bench, **asked)
            last = next(
                chunk
                for chunk in chunks
                if chunk["choices"] and chunk["choices"][0]["finish_reason"]
            )
            assert last["choices"][0]["token_ids"] == bench.engine.log[0].output_ids
            assert last["prompt_token_ids"] == bench.engine.log[0].input_ids.tolist()
            await bench.trajectories()

    asyncio.run(compare())


async def test_choices_of_one_stream_are_told_apart(tokenizer: Any) -> None:
    async with endpoint(
        tokenizer, lambda request: f"Answer {request.index}." + call(at="x"), token_latency=0.001
    ) as bench:
        chunks = await events(
            bench,
            messages=[USER],
            tools=[TOOL],
            n=3,
            logprobs=True,
            stream_options={"include_usage": True},
        )
        assert [joined(chunks, index)["content"] for index in range(3)] == [
            "Answer 0.",
            "Answer 1.",
            "Answer 2.",
        ]
        assert len({joined(chunks, index)["tool_calls"][0]["id"] for index in range(3)}) == 3
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == sum(
            len(entry.output_ids) for entry in bench.engine.log
        )
        finals = [
            choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
        ]
        assert [
            [entry["token_id"] for entry in final["logprobs"]["content"]] for final in finals
        ] == [final["token_ids"] for final in finals]
        assert len(await bench.trajectories()) == 3


async def test_a_failure_before_the_first_token_is_an_http_error(tokenizer: Any) -> None:
    plan = lambda request: Fault(status=400, body=b'{"error":{"message":"no"}}')
    async with endpoint(tokenizer, lambda request: "Hello.", faults=plan) as bench:
        status, answer = await bench.post(PATH, {"messages": [USER], "stream": True})
        assert (status, answer["error"]["code"]) == (400, "engine_refused")


async def test_a_failure_behind_it_is_an_event_and_nothing_is_trained(tokenizer: Any) -> None:
    held = Reply("One two three four five six seven.", hold=asyncio.Event(), hold_after=8)
    async with endpoint(tokenizer, lambda request: held) as bench:
        chunks = await events(bench, messages=[USER], begun=lambda: bench.engine.abort(every=True))
        assert chunks[-1]["error"]["code"] == "engine_aborted"
        assert await bench.trajectories(refused=1) == []


@pytest.mark.parametrize(
    ("asked", "calls"),
    [
        ({"tool_choice": "required"}, 2),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, 2),
        ({"parallel_tool_calls": False}, 1),
        ({"tool_choice": "none"}, 0),
        ({"stop": ["</tool_call>"]}, 1),
        ({"stop_token_ids": [300]}, 2),
    ],
)
async def test_a_stream_keeps_to_the_choice_of_tools(
    tokenizer: Any, asked: dict[str, Any], calls: int
) -> None:
    said = call(at="x") + call(at="y")
    async with endpoint(tokenizer, lambda request: said) as bench:
        chunks = await streamed(bench, tools=[TOOL], **asked)
        message = joined(chunks)
        assert len(message["tool_calls"]) == calls
        assert message["content"] == ("" if calls else said)
        await bench.trajectories()


async def test_a_forced_call_that_is_missing_ends_the_stream_with_an_error(tokenizer: Any) -> None:
    release = asyncio.Event()
    held = Reply("One two three four.", hold=release, hold_after=4)
    async with endpoint(tokenizer, lambda request: held) as bench:
        asked = {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}
        chunks = await events(bench, begun=release.set, **asked)  # type: ignore[arg-type]
        assert chunks[-1]["error"]["code"] == "engine_error"
        assert await bench.trajectories(refused=1) == []


class Contradictory(HermesParser):
    """A parser whose stream is not what it parses."""

    def parse(self, text: str, **options: Any) -> ParsedReply:
        return ParsedReply("Something else.")


async def test_a_stream_that_the_answer_contradicts_is_an_error_and_nothing_is_trained(
    tokenizer: Any,
) -> None:
    async with endpoint(tokenizer, lambda request: "One two three.") as bench:
        bench.served.parser = Contradictory()
        chunks = await events(bench, messages=[USER])
        assert chunks[-1]["error"]["code"] == "stream_mismatch"
        assert await bench.trajectories(refused=1) == []


async def test_a_retry_of_a_broken_stream_gets_all_of_it(tokenizer: Any) -> None:
    release = asyncio.Event()
    hold = lambda request: Reply("One two three four five six.", hold=release, hold_after=10**6)
    async with endpoint(tokenizer, hold) as bench:
        body = {"messages": [USER], "stream": True}
        async with bench.http.post(bench.url + PATH, json=body) as response:
            first = await response.content.readline()
            response.close()
        asking = asyncio.create_task(events(bench, retry=1, messages=[USER]))
        await bench.joined("s", retry=1)
        release.set()
        chunks = await asking
        assert joined(chunks)["content"] == "One two three four five six."
        [name] = {chunk["id"] for chunk in (orjson.loads(first.removeprefix(b"data: ")), *chunks)}
        assert name.startswith("chatcmpl-")
        assert len(bench.engine.log) == 1
        assert len(await bench.trajectories()) == 1


@pytest.mark.parametrize("stop", [None, ["six"]])
async def test_text_completions_stream(tokenizer: Any, stop: Any) -> None:
    async with endpoint(
        tokenizer, lambda request: "One two 日本 🙂 three six seven.", split="random"
    ) as bench:
        chunks = await events(
            bench,
            "/sessions/s/v1/completions",
            prompt="Count:",
            max_tokens=200,
            stop=stop,
            logprobs=0,
        )
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        assert text == "One two 日本 🙂 three " + ("" if stop else "six seven.")
        assert chunks[-1]["choices"][0]["logprobs"]["token_ids"] == bench.engine.log[0].output_ids
        await bench.trajectories()


async def test_a_streamed_text_completion_has_the_id_of_the_answer(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "One two three.") as bench:
        chunks = await events(
            bench, "/sessions/s/v1/completions", prompt="Hi", stream_options={"include_usage": True}
        )
        [pending] = bench.endpoint.sessions.find("s").pending.all()
        answer = pending.task.result()
        assert answer.id.startswith("cmpl-")
        assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {
            (answer.id, answer.created)
        }
