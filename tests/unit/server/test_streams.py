"""Streams over HTTP. That their deltas are the message is in `test_stream_deltas.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from support.episodes import call
from support.listed_environment import TOOL
from support.served import CHAT, TEXT, USER, ServedBench, in_session, serve
from support.stream_chunks import joined, whole

from toolroll.testing import Fault, Reply

PATH, TEXT_PATH = in_session(CHAT), in_session(TEXT)
Fields = dict[str, Any]
Chunks = list[Fields]


async def events(
    bench: ServedBench,
    path: str = PATH,
    /,
    *,
    begun: Callable[[], object] = lambda: None,
    **fields: Any,
) -> Chunks:
    """The events of a stream before "[DONE]". `begun` is called when the first of them has come."""
    body = {"stream": True, **({"messages": [USER]} if path == PATH else {}), **fields}
    async with bench.http.post(bench.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        text = await response.content.readany()
        begun()
        text += await response.read()
    data = [line.removeprefix(b"data: ") for line in text.split(b"\n\n") if line]
    assert data[-1] == b"[DONE]"
    return [orjson.loads(line) for line in data[:-1]]


def choices_of(chunks: Chunks) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def streamed(bench: ServedBench, **fields: Any) -> Chunks:
    """The events of a stream whose deltas are the message that is kept."""
    chunks = await events(bench, **fields)
    [turn] = bench.endpoint.sessions.find("s").tree._turns.values()
    assert joined(chunks) == whole(turn[0].reply)
    [last] = [each for each in chunks if each["choices"][0]["finish_reason"]]
    [entry] = bench.engine.log
    assert last["choices"][0]["token_ids"] == entry.output_ids
    assert last["prompt_token_ids"] == entry.input_ids.tolist()
    return chunks


async def test_choices_of_one_stream_are_told_apart() -> None:
    answer = lambda request: f"Answer {request.index}." + call(at="x")
    usage = {"include_usage": True}
    fields: Fields = {"tools": [TOOL], "n": 3, "logprobs": True, "stream_options": usage}
    async with serve(answer, token_latency=0.001) as bench:
        chunks = await events(bench, **fields)
        messages = [joined(chunks, index) for index in range(3)]
        assert [message["content"] for message in messages] == [f"Answer {n}." for n in range(3)]
        assert len({message["tool_calls"][0]["id"] for message in messages}) == 3
        assert chunks[-1]["choices"] == []
        sampled = sum(len(entry.output_ids) for entry in bench.engine.log)
        assert chunks[-1]["usage"]["completion_tokens"] == sampled
        for last in filter(lambda choice: choice["finish_reason"], choices_of(chunks)):
            ids = [entry["token_id"] for entry in last["logprobs"]["content"]]
            assert ids == last["token_ids"]
        assert len(await bench.trajectories()) == 3


async def test_a_failure_before_the_first_token_is_an_http_error() -> None:
    refused = Fault(status=400, body=b'{"error":{"message":"no"}}')
    async with serve(faults=lambda request: refused) as bench:
        refusal = await bench.refusal(PATH, {"messages": [USER], "stream": True})
        assert refusal[:2] == (400, "engine_refused")


@pytest.mark.parametrize("forced", [False, True], ids=["aborted", "a forced call is missing"])
async def test_a_failure_after_it_is_an_event_and_nothing_is_trained(forced: bool) -> None:
    release = asyncio.Event()
    held = Reply("One two three four five six seven.", hold=release, hold_after=8)
    async with serve(held) as bench:
        abort = lambda: bench.engine.abort(every=True)
        begun = release.set if forced else abort
        fields: Fields = {"tools": [TOOL], "tool_choice": "required"} if forced else {}
        chunks = await events(bench, begun=begun, **fields)
        assert chunks[-1]["error"]["code"] == ("engine_error" if forced else "engine_aborted")
        assert await bench.trajectories(refused=1) == []


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({"tool_choice": "required"}, 2),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, 2),
        ({"parallel_tool_calls": False}, 1),
        ({"tool_choice": "none"}, 0),
        ({"stop": ["</tool_call>"]}, 1),
        ({"stop_token_ids": [300]}, 2),
    ],
    ids=["required", "named", "one", "none", "a stop string", "a stop token"],
)
async def test_a_stream_follows_the_choice_of_tools(fields: dict[str, Any], calls: int) -> None:
    reply = call(at="x") + call(at="y")
    async with serve(reply) as bench:
        message = joined(await streamed(bench, tools=[TOOL], **fields))
        assert len(message["tool_calls"]) == calls
        assert message["content"] == ("" if calls else reply)
        await bench.trajectories()


@pytest.mark.parametrize("stop", [None, ["six"]])
async def test_text_completions_stream(stop: Any) -> None:
    fields: Fields = {"prompt": "Count:", "max_tokens": 200, "stop": stop, "logprobs": 0}
    fields["stream_options"] = {"include_usage": True}
    async with serve("One two 日本 🙂 three six seven.", split="random") as bench:
        chunks = await events(bench, TEXT_PATH, **fields)
        choices = choices_of(chunks)
        text = "".join(choice["text"] for choice in choices)
        assert text == "One two 日本 🙂 three " + ("" if stop else "six seven.")
        assert choices[-1]["logprobs"]["token_ids"] == bench.engine.log[0].output_ids
        [pending] = bench.endpoint.sessions.find("s").pending.all()
        answer = pending.task.result()
        assert answer.id.startswith("cmpl-")
        assert {(each["id"], each["created"]) for each in chunks} == {(answer.id, answer.created)}
        await bench.trajectories()
