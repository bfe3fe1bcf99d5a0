"""What Atropos' `ManagedServer` gets wrong: a test for each defect, by its number."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, InternalServerError
from support.client_scenario import play, saying
from support.hostile import drop_logprob
from support.in_process import managed, nodes_of, sampled, unmasked
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer
from support.served import USER, serve, user

from toolroll.endpoint.in_process import SequenceNode, managed_session
from toolroll.testing import Fault, Reply, load_embedded_tokenizer


def unfinished(*texts: str) -> list[Reply]:
    """Replies without a stop token."""
    return [Reply(text, stop=False) for text in texts]


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}], ids=["plain", "tools"])
async def test_b2_the_end_of_a_turn_is_not_doubled(fields: dict[str, Any]) -> None:
    async with managed("Hello there!", tokenizer=qwen3_tokenizer()) as (bench, m):
        reply = await m.chat_completion(messages=[USER], **fields)
        message = reply.choices[0].message
        assert message.content == "Hello there!"
        await m.chat_completion(messages=[USER, message, USER], **fields)
        assert "Hello there!<|im_end|>\n<|im_start|>user" in bench.prompt()
        assert "<|im_end|><|im_end|>" not in bench.prompt()


async def test_b3_a_text_extends_no_text_whose_tokens_it_breaks() -> None:
    tokenizer = qwen3_tokenizer()
    async with managed(unfinished("4", " is what it is."), tokenizer=tokenizer) as (bench, m):
        prompt = "Q: what?\nA: The answer is"
        await m.completion(prompt=prompt, max_tokens=8)
        await m.completion(prompt=prompt + "4ever. Next", max_tokens=8)
        # digits stand alone here
        assert tokenizer.encode("4ever") == tokenizer.encode("4") + tokenizer.encode("ever")
        await bench.trajectories()
    async with managed(unfinished("Hel", " you."), tokenizer=tokenizer) as (bench, m):
        await m.completion(prompt="Say:\n", max_tokens=8)
        await m.completion(prompt="Say:\nHello to", max_tokens=8)  # "Hel" + "lo" is one token
        assert bench.engine.log[1].input_ids.tolist() == tokenizer.encode("Say:\nHello to")
        assert len(await bench.trajectories()) == 2


async def test_b3_the_longest_sibling_is_extended() -> None:
    replies = unfinished("Hel", "Hello", " to you.")
    policy = lambda request: replies[request.index]
    async with managed(policy, tokenizer=qwen3_tokenizer()) as (bench, m):
        await m.completion(prompt="Say:\n", n=2, max_tokens=8)
        await m.completion(prompt="Say:\nHello there,", max_tokens=8)
        trajectories = await bench.trajectories()
        short, long = sorted(trajectories, key=lambda trajectory: len(trajectory["turns"]))
        assert "Hello there, to you." in bench.served.template.tokenizer.decode(long["input_ids"])
        assert (len(short["turns"]), len(long["turns"])) == (1, 2)


async def test_b4_a_tree_has_parents_and_trains_each_turn_once() -> None:
    async with managed(saying, tree=True, split="random") as (bench, m):
        await play(m.client.chat.completions.create)
        state = m.get_state()
        assert state["sequences"] == state["tree"]
        nodes, keys = nodes_of(state), list(state["sequences"])
        assert [unmasked(node) for node in nodes] == sampled(bench)
        parents = [node.metadata["parent"] for node in nodes if node.metadata]
        assert parents == [None, *keys[:-1]]
        for entry, node in zip(bench.engine.log, nodes, strict=True):
            assert node.tokens == [*entry.input_ids.tolist(), *entry.output_ids]


async def test_b5_a_rewritten_history_forks_and_says_so() -> None:
    thinking = "<think>\nWhat?\n</think>\n\nHello."
    async with managed(thinking, tokenizer=qwen3_tokenizer()) as (bench, m):
        reply = await m.chat_completion(messages=[USER])
        await m.chat_completion(messages=[USER, reply.choices[0].message, USER])
        nodes = m.get_state()["nodes"]
        assert [unmasked(node) for node in nodes] == sampled(bench)
        assert [bool(node.metadata["fork_reason"]) for node in nodes] == [False, True]


async def test_b9_a_missing_logprob_is_refused_and_never_padded() -> None:
    faults = lambda request: Fault(garble=drop_logprob) if request.index == 0 else None
    async with managed(faults=faults) as (bench, m):
        create: Any = m.client.with_options(max_retries=0).chat.completions.create
        with pytest.raises(InternalServerError):
            await create(model="m", messages=[USER])
        assert m.get_state() == {"nodes": []}
        await m.chat_completion(messages=[USER])
        [node] = m.get_state()["nodes"]
        assert unmasked(node) == bench.engine.log[1].output_ids


async def test_b12_what_the_engine_cannot_take_is_refused_by_name() -> None:
    async with managed() as (bench, m):
        params: dict[str, Any] = {"top_k": 20, "min_p": 0.1}
        extra = {"return_token_ids": True}
        await m.chat_completion(messages=[USER], logprobs=True, extra_body=extra, **params)
        sent = bench.engine.log[0].sampling_params
        assert sent == {**sent, **params}
        assert not {"logprobs", "return_token_ids", "extra_body"} & set(sent)
        with pytest.raises(BadRequestError) as caught:
            await m.chat_completion(messages=[USER], top_q=3)
        assert caught.value.param == "top_q"


async def test_a_managed_session_of_its_own_and_its_end() -> None:
    """Without a tokenizer, it is found from the model of the engine."""
    options: dict[str, Any] = {"track_tree": False, "tool_parser": "hermes"}
    async with serve() as bench:
        lent = (bench.engine.url, bench.served.engine, bench.served)
        given = [(engine, load_embedded_tokenizer()) for engine in lent]
        for engine, tokenizer in (*given, *((engine, None) for engine in lent[:2])):
            async with managed_session(engine, tokenizer, **options) as m:
                await m.chat_completion(messages=[USER])
                [node] = m.get_state()["nodes"]
                assert node.metadata is not None
                assert (node.metadata["trainable"], node.metadata["turns"]) == (True, 1)
                m.reset()
                assert m.get_state() == {"nodes": []}
                assert unmasked(node) == bench.engine.log[-1].output_ids
            assert len(m.endpoint.sessions) == 0
        await bench.ask(USER)  # what was lent is still open


def trained(node: SequenceNode) -> tuple[tuple[int, int, np.float32], ...]:
    """Position, id and logprob of each token with loss."""
    assert unmasked(node)
    tokens = enumerate(zip(node.masked_tokens, node.logprobs, strict=True))
    return tuple((at, token, np.float32(value)) for at, (token, value) in tokens if token != -100)


def answer(prompt: Any, ids: Sequence[int], logprobs: Sequence[float]) -> Any:
    """The ids of a sequence, and what is trained of it."""
    tokens = enumerate(zip(ids, logprobs, strict=True), len(prompt))
    whole = tuple(map(int, [*prompt, *ids]))
    return whole, tuple((at, token, np.float32(value)) for at, (token, value) in tokens)


@pytest.mark.parametrize("tree", [False, True])
async def test_b1_b10_c3_each_answer_of_many_is_trained_once(tree: bool) -> None:
    """Of three replies only: equal answers to one prompt are different samples."""
    policy = lambda request: ("Yes.", "No.", "Maybe so.")[request.index % 3]
    returned: list[Any] = []
    async with managed(policy, tree=tree, split="random") as (bench, m):

        async def ask(messages: list[Any], n: int) -> list[list[Any]]:
            reply: Any = await m.chat_completion(messages=messages, n=n, max_tokens=32)
            for choice in reply.choices:
                logprobs = [place.logprob for place in choice.logprobs.content]
                returned.append(answer(reply.prompt_token_ids, choice.token_ids, logprobs))
            return [[*messages, choice.message, user("Why?")] for choice in reply.choices]

        talks: list[list[Any]] = [[USER]]
        for count, n in ((8, 4), (24, 2), (24, 1)):
            waiting = [ask(talks[at % len(talks)], n) for at in range(count)]
            talks = [talk for talks in await asyncio.gather(*waiting) for talk in talks]
        nodes = nodes_of(m.get_state())
    served = bench.engine.log
    log = [answer(entry.input_ids, entry.output_ids, entry.logprobs) for entry in served]
    assert len(log) == 8 * 4 + 24 * 2 + 24
    assert Counter(returned) == Counter(log)
    if tree:
        assert Counter((tuple(node.tokens), trained(node)) for node in nodes) == Counter(log)
    tokens = [token for _, answered in log for token in answered]
    assert Counter(token for node in nodes for token in trained(node)) == Counter(tokens)
