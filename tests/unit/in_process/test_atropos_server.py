"""What Atropos' `ManagedServer` gets wrong: a test for each defect that can be tested, by its
number.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError
from support.client_scenario import play, saying
from support.endpoints import Bench, endpoint
from support.hostile import drop_logprob
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer

from toolroll.endpoint.in_process import (
    ManagedSession,
    SequenceNode,
    managed_session,
)
from toolroll.testing import (
    Fault,
    Reply,
    load_embedded_tokenizer,
)

qwen = qwen3_tokenizer
USER: Any = {"role": "user", "content": "Hi"}


@asynccontextmanager
async def managed(
    policy: Any, *, tokenizer: Any = None, tree: bool = False, **more: Any
) -> AsyncIterator[tuple[Bench, ManagedSession]]:
    """A managed session "s", and the bench that judges it."""
    async with endpoint(tokenizer or load_embedded_tokenizer(), policy, **more) as bench:
        yield bench, ManagedSession(bench.endpoint, session="s", track_tree=tree)


def unmasked(node: SequenceNode) -> list[int]:
    """The tokens with loss; every list as long as the others, and logprobs where they belong."""
    assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
    for token, masked, logprob in zip(node.tokens, node.masked_tokens, node.logprobs, strict=True):
        assert (masked, logprob) == (-100, 1.0) or (masked == token and logprob <= 0.0)
    return [token for token in node.masked_tokens if token != -100]


def sampled(bench: Bench) -> list[list[int]]:
    return [entry.output_ids for entry in bench.engine.log]


async def test_b1_every_turn_of_a_chat_is_trained() -> None:
    async with managed(lambda request: f"Reply {request.call}.", split="random") as (bench, m):
        messages: list[Any] = [USER]
        for _ in range(5):
            reply = await m.chat_completion(messages=messages)
            messages += [reply.choices[0].message, USER]
        [node] = m.get_state()["nodes"]
        assert unmasked(node) == [index for ids in sampled(bench) for index in ids]
        assert node.metadata is not None
        assert (node.metadata["trainable"], node.metadata["turns"]) == (True, 5)
        await bench.trajectories()


@pytest.mark.parametrize("tools", [None, [TOOL]])
async def test_b2_the_end_of_a_turn_is_not_doubled(tools: Any) -> None:
    async with managed(lambda request: "Hello there!", tokenizer=qwen()) as (bench, m):
        more = {"tools": tools} if tools else {}
        reply = await m.chat_completion(messages=[USER], **more)
        assert reply.choices[0].message.content == "Hello there!"
        await m.chat_completion(messages=[USER, reply.choices[0].message, USER], **more)
        prompt = bench.served.template.tokenizer.decode(bench.engine.log[1].input_ids)
        assert "Hello there!<|im_end|>\n<|im_start|>user" in prompt
        assert "<|im_end|><|im_end|>" not in prompt


async def test_b3_a_text_extends_no_text_whose_tokens_it_breaks() -> None:
    said = ["4", " is what it is."]
    tokenizer = qwen()
    async with managed(
        lambda request: Reply(said[request.call], stop=False), tokenizer=tokenizer
    ) as (bench, m):
        prompt = "Q: what?\nA: The answer is"
        await m.completion(prompt=prompt, max_tokens=8)
        await m.completion(prompt=prompt + "4ever. Next", max_tokens=8)
        # digits stand alone here
        assert len(tokenizer.encode("4ever")) == len(tokenizer.encode("4")) + len(
            tokenizer.encode("ever")
        )
        await bench.trajectories()
    words = ["Hel", " you."]
    async with managed(
        lambda request: Reply(words[request.call], stop=False), tokenizer=tokenizer
    ) as (bench, m):
        await m.completion(prompt="Say:\n", max_tokens=8)
        await m.completion(prompt="Say:\nHello to", max_tokens=8)  # "Hel" + "lo" is one token
        assert bench.engine.log[1].input_ids.tolist() == tokenizer.encode("Say:\nHello to")
        assert len(await bench.trajectories()) == 2


async def test_b3_the_longest_sibling_is_extended() -> None:
    tokenizer = qwen()
    said = ["Hel", "Hello", " to you."]
    async with managed(
        lambda request: Reply(said[request.index], stop=False), tokenizer=tokenizer
    ) as (bench, m):
        await m.completion(prompt="Say:\n", n=2, max_tokens=8)
        await m.completion(prompt="Say:\nHello there,", max_tokens=8)
        [short, long] = sorted(await bench.trajectories(), key=lambda found: len(found["turns"]))
        assert "Hello there, to you." in tokenizer.decode(long["input_ids"])
        assert (len(short["turns"]), len(long["turns"])) == (1, 2)


async def test_b4_a_tree_has_parents_and_trains_each_turn_once() -> None:
    async with managed(saying, tree=True, split="random") as (bench, m):
        await play(m.client.chat.completions.create)
        state = m.get_state()
        assert state["sequences"] == state["tree"]
        nodes = list(state["sequences"].values())
        assert [unmasked(node) for node in nodes] == sampled(bench)
        keys = list(state["sequences"])
        assert [node.metadata["parent"] for node in nodes] == [None, *keys[:-1]]
        for entry, node in zip(bench.engine.log, nodes, strict=True):
            assert node.tokens == [*entry.input_ids.tolist(), *entry.output_ids]


async def test_b5_a_rewritten_history_forks_and_says_so() -> None:
    think = lambda request: "<think>\nWhat?\n</think>\n\nHello."
    async with managed(think, tokenizer=qwen()) as (bench, m):
        reply = await m.chat_completion(messages=[USER])
        await m.chat_completion(messages=[USER, reply.choices[0].message, USER])
        first, second = m.get_state()["nodes"]
        assert [unmasked(first), unmasked(second)] == sampled(bench)
        assert first.metadata["fork_reason"] is None
        assert second.metadata["fork_reason"]


async def test_b9_a_missing_logprob_is_refused_and_never_padded() -> None:
    plan = lambda request: Fault(garble=drop_logprob) if request.index == 0 else None
    async with managed(lambda request: "Hello.", faults=plan) as (bench, m):
        with pytest.raises(InternalServerError):
            await m.client.with_options(max_retries=0).chat.completions.create(
                model="m", messages=[USER]
            )
        assert m.get_state() == {"nodes": []}
        await m.chat_completion(messages=[USER])
        [node] = m.get_state()["nodes"]
        assert unmasked(node) == bench.engine.log[1].output_ids


@pytest.mark.parametrize("tree", [False, True])
async def test_b10_identical_answers_are_all_there(tree: bool) -> None:
    async with managed(lambda request: "Hello.", tree=tree) as (bench, m):
        reply: Any = await m.chat_completion(messages=[USER], n=3, logprobs=True)
        state = m.get_state()
        nodes = list(state["sequences"].values()) if tree else state["nodes"]
        assert (
            [unmasked(node) for node in nodes]
            == [choice.token_ids for choice in reply.choices]
            == sampled(bench)
        )
        assert all(
            [entry.token_id for entry in choice.logprobs.content] == choice.token_ids
            for choice in reply.choices
        )
        assert reply.usage.completion_tokens == sum(map(len, sampled(bench)))


async def test_b12_what_the_engine_cannot_take_is_refused_by_name() -> None:
    async with managed(lambda request: "Hello.") as (bench, m):
        await m.chat_completion(
            messages=[USER],
            logprobs=True,
            extra_body={"return_token_ids": True},
            top_k=20,
            min_p=0.1,
        )
        params = bench.engine.log[0].sampling_params
        assert (params["top_k"], params["min_p"]) == (20, 0.1)
        assert not {"logprobs", "return_token_ids", "extra_body"} & set(params)
        with pytest.raises(BadRequestError) as caught:
            await m.chat_completion(messages=[USER], top_q=3)
        assert caught.value.param == "top_q"


async def test_a_managed_session_of_its_own_and_its_end() -> None:
    async with endpoint(load_embedded_tokenizer(), lambda request: "Hello.") as bench:
        for engine in (bench.engine.url, bench.served.engine, bench.served):
            async with managed_session(
                engine, load_embedded_tokenizer(), track_tree=False, tool_parser="hermes"
            ) as m:
                await m.chat_completion(messages=[USER])
                kept = m.get_state()["nodes"]
                m.reset()
                assert m.get_state() == {"nodes": []}
                assert unmasked(kept[0]) == bench.engine.log[-1].output_ids
            assert len(m.endpoint.sessions) == 0
        # what was lent is still open
        await bench.client().chat.completions.create(model="m", messages=[USER])


async def test_a_tokenizer_is_found_from_the_model_that_the_engine_serves() -> None:
    async with endpoint(load_embedded_tokenizer(), lambda request: "Hello.") as bench:
        assert bench.engine.model_name == "embedded"
        for engine in (bench.engine.url, bench.served.engine):
            async with managed_session(engine) as m:
                await m.chat_completion(messages=[USER])
                [node] = m.get_state()["nodes"]
                assert unmasked(node) == bench.engine.log[-1].output_ids
