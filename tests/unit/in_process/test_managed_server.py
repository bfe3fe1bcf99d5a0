"""`ManagedServer` and `DummyManagedServer` with Atropos' names, constructors and calls: code that
was written for the published classes, unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.episodes import call
from support.in_process import nodes_of, sampled, unmasked
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer
from support.served import USER, ServedBench, assistant, serve, system

from toolroll.endpoint.in_process import DummyManagedServer, ManagedServer
from toolroll.rollout.errors import UsageError
from toolroll.testing import load_embedded_tokenizer


def api_server(bench: ServedBench, **config: Any) -> Any:
    """What code reads of Atropos' `SGLangServer` (atroposlib 0.4.0)."""
    names = {"server_type": "sglang", "model_name": "embedded", "tokenizer_name": "none"}
    address = {"base_url": f"{bench.engine.url}/v1", "api_key": "x", "timeout": 60}
    return SimpleNamespace(
        config=SimpleNamespace(**{**address, **names, **config}),
        sem=asyncio.Semaphore(2),
        eval_sem=asyncio.Semaphore(1),
        server_healthy=True,
    )


@asynccontextmanager
async def managed(
    replies: Any = "Hello.", *args: Any, tokenizer: Any = None
) -> AsyncIterator[tuple[ServedBench, Any]]:
    """A published server and what judges it."""
    async with serve(replies, tokenizer=tokenizer) as bench:
        m = ManagedServer(api_server(bench), tokenizer, *args)
        try:
            yield bench, m
        finally:
            await m.aclose()


async def collect_trajectories(server: Any, tokenizer: Any = None) -> list[dict[str, Any]]:
    """The body of an Atropos environment: a group, an evaluation, and their tokens."""
    managed = ManagedServer(server=server, tokenizer=tokenizer, track_tree=False)
    completions = await managed.chat_completion(
        messages=[system("You are terse."), USER],
        n=4,
        max_tokens=64,
        temperature=1.0,
        top_p=0.95,
        split="train",
    )
    state = managed.get_state()
    group = [
        {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "logprobs": node.logprobs,
            "score": 1.0 if (choice.message.content or "").endswith("1.") else -1.0,
        }
        for choice, node in zip(completions.choices, state["nodes"], strict=True)
    ]
    managed.reset()
    await managed.chat_completion(messages=[USER], temperature=0.0, split="eval")
    await managed.completion(prompt="One two", max_tokens=4, split="eval")
    await managed.aclose()  # the one line that is new
    return group


async def test_an_environments_body_as_published() -> None:
    async with serve(lambda request: f"Answer {request.index}.") as bench:
        group = await collect_trajectories(api_server(bench))
        assert [row["score"] for row in group] == [-1.0, 1.0, -1.0, -1.0]
        for row, entry in zip(group, bench.engine.log[:4], strict=True):
            assert row["tokens"] == [*entry.input_ids.tolist(), *entry.output_ids]
            assert row["masks"] == [-100] * len(entry.input_ids) + entry.output_ids
            assert row["logprobs"][len(entry.input_ids) :] == pytest.approx(entry.logprobs)
        assert len(bench.engine.log) == 6


async def test_split_is_no_unknown_parameter() -> None:
    async with managed() as (bench, m):
        await m.chat_completion(messages=[USER], split="train", skip_reasoning=True)
        await m.completion(prompt="One", max_tokens=2, split="eval")
        for entry in bench.engine.log:
            assert not {"split", "skip_reasoning"} & set(entry.sampling_params)


async def test_requests_hold_the_servers_semaphore_of_their_split() -> None:
    async with managed() as (bench, m):
        async with m.server.eval_sem:
            waiting = asyncio.ensure_future(m.chat_completion(messages=[USER], split="eval"))
            await m.chat_completion(messages=[USER], split="train")
            assert not waiting.done()
            assert len(bench.engine.log) == 1
        await waiting
        assert (m.server.sem._value, m.server.eval_sem._value) == (2, 1)


async def test_a_tokenizer_is_found_from_the_model_name() -> None:
    async with serve() as bench:
        other = {"model_name": "other", "tokenizer_name": "embedded"}
        for config in ({"model_name": "embedded"}, other):
            async with ManagedServer(api_server(bench, **config)) as m:
                await m.chat_completion(messages=[USER])
                [node] = m.get_state()["nodes"]
                assert unmasked(node) == bench.engine.log[-1].output_ids
                assert m.tokenizer.decode(node.tokens) == node.full_text


async def test_what_serves_no_exact_tokens_is_refused_by_name() -> None:
    async with serve() as bench:
        for server, tokenizer, words in (
            (api_server(bench, model_name="default"), None, "no tokenizer is named"),
            (bench.engine.url, None, "no tokenizer is named"),
            (api_server(bench, server_type="vllm"), None, "of type 'vllm'"),
            (object(), "embedded", "not object"),
        ):
            with pytest.raises(UsageError, match=words):
                ManagedServer(server, tokenizer)


async def test_the_content_is_the_whole_text() -> None:
    """Atropos' environments look for `</think>` in the content, and read `nodes[0]`. Reasoning
    stays in the history.
    """
    replies = ["<think>\nWhat?\n</think>\n\nHello.", "Bye."]
    policy = lambda request: replies[request.index]
    async with managed(policy, tokenizer=qwen3_tokenizer()) as (bench, m):
        content = (await m.chat_completion(messages=[USER])).choices[0].message.content
        assert content == replies[0]
        await m.chat_completion(messages=[USER, assistant(content), USER])
        [node] = m.get_state()["nodes"]
        assert unmasked(node) == [index for ids in sampled(bench) for index in ids]


async def test_tools_need_a_parser_and_are_never_left_out_silently() -> None:
    reply = call(at="x")
    async with managed(reply) as (_, m):
        with pytest.raises(UsageError, match="tool_parser"):
            await m.chat_completion(messages=[USER], tools=[TOOL])
    async with managed(reply, False, "hermes") as (_, m):
        answer = await m.chat_completion(messages=[USER], tools=[TOOL], tool_choice="auto")
        [tool_call] = answer.choices[0].message.tool_calls
        assert tool_call.function.arguments == '{"at": "x"}'


@pytest.mark.parametrize("tree", [False, True])
async def test_a_dummy_has_the_published_shape_and_trains_nothing(tree: bool) -> None:
    async with serve() as bench:
        m = DummyManagedServer(bench.client(None), load_embedded_tokenizer(), tree, model="m")
        await m.chat_completion(messages=[USER], n=2, split="eval")
        state = m.get_state()
        assert set(state) == ({"sequences", "tree"} if tree else {"nodes"})
        nodes = nodes_of(state)
        masked = [[token for token in node.masked_tokens if token != -100] for node in nodes]
        assert masked == [[], []]  # two equal answers, both kept
        expected = {"dummy_tokens": True, "trainable": False, "source": "transcript"}
        for node in nodes:
            assert node.tokens and node.metadata == {**(node.metadata or {}), **expected}
        assert nodes[0].full_text == "user:Hi\n\nassistant:Hello."
        with pytest.raises(UsageError, match="no logprobs"):
            await m.get_logprobs(prompt="x")
        theirs = DummyManagedServer(server=m)  # anything with the two coroutines
        await theirs.completion(prompt="One", split="train")
        assert theirs.get_state()["nodes"][0].metadata["finish_reason"] == "stop"
        m.reset()
        assert not any(m.get_state().values())
