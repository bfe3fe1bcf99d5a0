"""A last message of the assistant, which the model continues (Atropos' prefill): the tokens of the
prompt, of the trained sequence, and of the turn after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import BadRequestError
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer, tokenizer_for, trl_template

from toolroll.endpoint.in_process import ManagedServer, ManagedSession
from toolroll.rollout.template.encode import as_ids
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.testing import load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}


def prefilled(text: str) -> list[Any]:
    return [USER, {"role": "assistant", "content": text}]


@asynccontextmanager
async def managed(tokenizer: Any, policy: Any, **more: Any) -> AsyncIterator[tuple[Bench, Any]]:
    async with endpoint(tokenizer, policy, split="random") as bench:
        yield bench, ManagedSession(bench.endpoint, session="s", **more)


def tokenizers() -> list[Any]:
    return [
        load_embedded_tokenizer(),
        qwen3_tokenizer(),
        tokenizer_for(trl_template("llama3")),
        tokenizer_for(trl_template("gemma")),
    ]


@pytest.mark.parametrize("at", range(4))
async def test_the_prompt_is_the_generation_prompt_and_the_text(at: int) -> None:
    tokenizer = tokenizers()[at]
    async with managed(tokenizer, lambda request: " Paris, of course.") as (bench, m):
        reply = await m.chat_completion(messages=prefilled("The capital is"))
        assert reply.choices[0].message.content == " Paris, of course."
        [entry] = bench.engine.log
        whole = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
        assert bench.served.template.encoder.decode(entry.input_ids) == whole + "The capital is"
        expected = tokenizer(whole + "The capital is", add_special_tokens=False)["input_ids"]
        assert entry.input_ids.tolist() == expected
        [trajectory] = await bench.trajectories()  # judged: what was served is what is trained
        [turn] = trajectory["turns"]
        assert (turn["start"], turn["excluded"]) == (len(entry.input_ids), None)
        assert trajectory["input_ids"] == [*entry.input_ids.tolist(), *entry.output_ids]


@pytest.mark.parametrize("at", range(4))
async def test_the_whole_turn_is_continued_as_one_sequence(at: int) -> None:
    """An environment puts the prefill and the reply together, and goes on."""
    said = [" Paris.", "Berlin.", " done."]
    policy = lambda request: said[request.index]
    async with managed(tokenizers()[at], policy) as (bench, m):
        reply = await m.chat_completion(messages=prefilled("The capital is"))
        whole = "The capital is" + reply.choices[0].message.content
        messages = [USER, {"role": "assistant", "content": whole}, USER]
        second = await m.chat_completion(messages=messages)
        messages += [second.choices[0].message, USER, {"role": "assistant", "content": "I am"}]
        await m.chat_completion(messages=messages)
        [trajectory] = await bench.trajectories()
        assert [turn["excluded"] for turn in trajectory["turns"]] == [None] * 3
        [node] = m.get_state()["nodes"]
        assert [token for token in node.masked_tokens if token != -100] == [
            index for entry in bench.engine.log for index in entry.output_ids
        ]


async def test_a_thought_that_was_begun_is_continued() -> None:
    """`<think>` is one token, as Atropos' environments mean it; the content is what follows."""
    tokenizer = qwen3_tokenizer()
    async with endpoint(tokenizer, lambda request: "It is 4.\n</think>\n\n4") as bench:
        async with ManagedServer(bench.engine.url, tokenizer) as m:
            reply = await m.chat_completion(messages=prefilled("<think>\n"), n=2)
            for choice in reply.choices:
                assert choice.message.content == "It is 4.\n</think>\n\n4"
            ids = bench.engine.log[0].input_ids.tolist()
            assert ids[-2:] == tokenizer.encode("<think>\n", add_special_tokens=False)
        session = ManagedSession(bench.endpoint)  # with a parser that reads reasoning
        reply = await session.chat_completion(messages=prefilled("<think>\nWell, "))
        message = reply.choices[0].message
        assert message.content == "4"
        assert message.model_dump()["reasoning_content"].endswith("It is 4.")


async def test_a_call_that_was_begun_is_read_as_a_call() -> None:
    whole = call(at="x")
    head, _, tail = whole.partition('"name"')
    async with managed(qwen3_tokenizer(), lambda request: '"name"' + tail) as (bench, m):
        reply = await m.chat_completion(messages=prefilled(head), tools=[TOOL])
        [found] = reply.choices[0].message.tool_calls
        assert found.function.arguments == '{"at": "x"}'
        answer = {"role": "tool", "tool_call_id": found.id, "content": "seen"}
        await m.chat_completion(messages=[USER, reply.choices[0].message, answer], tools=[TOOL])
        [trajectory] = await bench.trajectories()
        assert [turn["excluded"] for turn in trajectory["turns"]] == [None] * 2


@pytest.mark.parametrize(
    ("messages", "more", "words"),
    [
        (prefilled("\n\nHello"), {}, "becomes one token"),
        (prefilled("Hello<|im_end|>"), {}, r"special token '<\|im_end\|>'"),
        (prefilled(""), {}, "it must be text without calls"),
        (prefilled("x")[1:], {}, "the only message"),
        ([USER], {"continue_final_message": True}, "is not the assistant's"),
        (prefilled("x"), {"response_format": {"type": "json_object"}}, "cannot be combined"),
        (prefilled("x"), {"stream": True}, "cannot be combined"),
        (prefilled("x"), {"continue_final_message": False}, "continue_final_message: true"),
    ],
)
async def test_what_cannot_be_continued_exactly_is_refused(
    messages: list[Any], more: dict[str, Any], words: str
) -> None:
    async with managed(qwen3_tokenizer(), lambda request: "Hello.") as (bench, m):
        with pytest.raises(BadRequestError, match=words):
            await m.chat_completion(messages=messages, **more)
        assert bench.engine.log == []


async def test_over_http_a_message_is_continued_only_if_that_is_asked_for() -> None:
    async with endpoint(load_embedded_tokenizer(), lambda request: " there.") as bench:
        create: Any = bench.client().chat.completions.create
        with pytest.raises(BadRequestError, match="continue_final_message"):
            await create(model="m", messages=prefilled("Hello"))
        extra = {"continue_final_message": True}
        reply = await create(model="m", messages=prefilled("Hello"), extra_body=extra)
        assert reply.choices[0].message.content == " there."
        assert len(await bench.trajectories()) == 1


async def test_a_wrong_prefill_is_found_by_the_verifier() -> None:
    async with endpoint(load_embedded_tokenizer(), lambda request: " there.") as bench:
        template = bench.served.template
        prompt = template.prompt([USER])
        given, sampled = template.encoder.encode("Hello"), template.encoder.encode(" there.")
        messages = [USER, {"role": "assistant", "content": "Hello there."}]
        for text, verdict in (("Hello", None), ("Hullo", "prefill")):
            span = TurnSpan(
                len(prompt), len(prompt) + len(given) + len(sampled), 1, True, text,
                len(prompt) + len(given),
            )  # fmt: skip
            ids = as_ids([*prompt, *given, *sampled])
            served = ServedSequence(ids, (span,), messages, [])
            assert template.verifier.check(served) == verdict
