"""What Atropos' `ManagedServer` gets wrong: a test for each defect that can be tested, by its
number.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, InternalServerError
from support.client_scenario import play, saying
from support.hostile import drop_logprob
from support.in_process import managed, nodes_of, sampled, unmasked
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer
from support.served import USER, serve

from toolroll.endpoint.in_process import managed_session
from toolroll.testing import Fault, Reply, load_embedded_tokenizer


def unfinished(*texts: str) -> list[Reply]:
    """Replies without a stop token."""
    return [Reply(text, stop=False) for text in texts]


async def test_b1_every_turn_of_a_chat_is_trained() -> None:
    async with managed([f"Reply {n}." for n in range(5)], split="random") as (bench, m):
        messages: list[Any] = [USER]
        for _ in range(5):
            reply = await m.chat_completion(messages=messages)
            messages += [reply.choices[0].message, USER]
        [node] = m.get_state()["nodes"]
        assert unmasked(node) == [index for ids in sampled(bench) for index in ids]
        assert node.metadata is not None
        assert (node.metadata["trainable"], node.metadata["turns"]) == (True, 5)
        await bench.trajectories()


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


@pytest.mark.parametrize("tree", [False, True])
async def test_b10_identical_answers_are_all_there(tree: bool) -> None:
    async with managed(tree=tree) as (bench, m):
        reply: Any = await m.chat_completion(messages=[USER], n=3, logprobs=True)
        expected = sampled(bench)
        assert [unmasked(node) for node in nodes_of(m.get_state())] == expected
        assert [choice.token_ids for choice in reply.choices] == expected
        contents = [choice.logprobs.content for choice in reply.choices]
        assert [[token.token_id for token in content] for content in contents] == expected
        assert reply.usage.completion_tokens == sum(map(len, expected))


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
    options: dict[str, Any] = {"track_tree": False, "tool_parser": "hermes"}
    async with serve() as bench:
        for engine in (bench.engine.url, bench.served.engine, bench.served):
            async with managed_session(engine, load_embedded_tokenizer(), **options) as m:
                await m.chat_completion(messages=[USER])
                [node] = m.get_state()["nodes"]
                m.reset()
                assert m.get_state() == {"nodes": []}
                assert unmasked(node) == bench.engine.log[-1].output_ids
            assert len(m.endpoint.sessions) == 0
        await bench.ask(USER)  # what was lent is still open


async def test_a_tokenizer_is_found_from_the_model_of_the_engine() -> None:
    async with serve() as bench:
        assert bench.engine.model_name == "embedded"
        for engine in (bench.engine.url, bench.served.engine):
            async with managed_session(engine) as m:
                await m.chat_completion(messages=[USER])
                [node] = m.get_state()["nodes"]
                assert unmasked(node) == bench.engine.log[-1].output_ids
