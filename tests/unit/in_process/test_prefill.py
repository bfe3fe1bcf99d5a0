"""A last message of the assistant, which the model continues (Atropos' prefill): the tokens of the
prompt, of the trained sequence, and of the turn after it.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError
from support.episodes import call
from support.in_process import managed, sampled, unmasked
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer, tokenizer_for, trl_template
from support.served import USER, Message, assistant, serve

from toolroll.endpoint.in_process import ManagedServer, ManagedSession
from toolroll.rollout.template.encode import as_ids
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.testing import load_embedded_tokenizer

TOKENIZERS: dict[str, Any] = {
    "embedded": load_embedded_tokenizer,
    "qwen3": qwen3_tokenizer,
    "llama3": lambda: tokenizer_for(trl_template("llama3")),
    "gemma": lambda: tokenizer_for(trl_template("gemma")),
}


def prefilled(text: str) -> list[Message]:
    return [USER, assistant(text)]


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_the_prompt_is_the_generation_prompt_and_the_text(name: str) -> None:
    """An environment puts the prefill and the reply together, and goes on: one sequence."""
    tokenizer, replies = TOKENIZERS[name](), [" Paris.", "Berlin.", " done."]
    async with managed(replies, tokenizer=tokenizer, split="random") as (bench, m):
        content = (await m.chat_completion(messages=prefilled("The capital is"))).choices[0]
        assert content.message.content == " Paris."
        opened = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
        text = opened + "The capital is"
        assert bench.prompt() == text
        [entry] = bench.engine.log
        assert entry.input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        trajectory = await bench.one_trajectory(turns=1)  # what was served is what is trained
        assert trajectory["turns"][0]["start"] == len(entry.input_ids)
        assert trajectory["input_ids"] == [*entry.input_ids.tolist(), *entry.output_ids]
        messages: list[Any] = [USER, assistant("The capital is Paris."), USER]
        second = await m.chat_completion(messages=messages)
        messages += [second.choices[0].message, USER, assistant("I am")]
        await m.chat_completion(messages=messages)
        trajectory = await bench.one_trajectory(turns=3)
        assert [turn["excluded"] for turn in trajectory["turns"]] == [None] * 3
        [node] = m.get_state()["nodes"]
        assert unmasked(node) == [index for ids in sampled(bench) for index in ids]


async def test_a_thought_that_was_begun_is_continued() -> None:
    """`<think>` is one token, as Atropos' environments mean it; the content is what follows."""
    tokenizer, text = qwen3_tokenizer(), "It is 4.\n</think>\n\n4"
    async with serve(text, tokenizer=tokenizer) as bench:
        async with ManagedServer(bench.engine.url, tokenizer) as m:
            reply = await m.chat_completion(messages=prefilled("<think>\n"), n=2)
            assert [choice.message.content for choice in reply.choices] == [text] * 2
            ids = bench.engine.log[0].input_ids.tolist()
            assert ids[-2:] == tokenizer.encode("<think>\n", add_special_tokens=False)
        session = ManagedSession(bench.endpoint)  # with a parser that reads reasoning
        reply = await session.chat_completion(messages=prefilled("<think>\nWell, "))
        message = reply.choices[0].message
        assert message.content == "4"
        assert message.model_dump()["reasoning_content"].endswith("It is 4.")


async def test_a_call_that_was_begun_is_read_as_a_call() -> None:
    head, name, tail = call(at="x").partition('"name"')
    async with managed(name + tail, tokenizer=qwen3_tokenizer(), split="random") as (bench, m):
        reply: Any = await m.chat_completion(messages=prefilled(head), tools=[TOOL])
        message = reply.choices[0].message
        [tool_call] = message.tool_calls
        assert tool_call.function.arguments == '{"at": "x"}'
        result = {"role": "tool", "tool_call_id": tool_call.id, "content": "seen"}
        await m.chat_completion(messages=[USER, message, result], tools=[TOOL])
        trajectory = await bench.one_trajectory(turns=2)
        assert [turn["excluded"] for turn in trajectory["turns"]] == [None] * 2


async def test_what_cannot_be_continued_exactly_is_refused() -> None:
    rows: list[tuple[list[Message], dict[str, Any], str]] = [
        (prefilled("\n\nHello"), {}, "becomes one token"),
        (prefilled("Hello<|im_end|>"), {}, r"special token '<\|im_end\|>'"),
        (prefilled(""), {}, "it must be text without calls"),
        (prefilled("x")[1:], {}, "the only message"),
        ([USER], {"continue_final_message": True}, "is not the assistant's"),
        (prefilled("x"), {"response_format": {"type": "json_object"}}, "cannot be combined"),
        (prefilled("x"), {"stream": True}, "cannot be combined"),
        (prefilled("x"), {"continue_final_message": False}, "continue_final_message: true"),
    ]
    async with managed(tokenizer=qwen3_tokenizer()) as (bench, m):
        for messages, fields, words in rows:
            with pytest.raises(BadRequestError, match=words):
                await m.chat_completion(messages=messages, **fields)
        assert bench.engine.log == []


async def test_a_wrong_prefill_is_found_by_the_verifier() -> None:
    async with serve() as bench:
        template = bench.served.template
        prompt = template.prompt([USER])
        given, sampled = template.encoder.encode("Hello"), template.encoder.encode(" there.")
        start = len(prompt) + len(given)
        ids = as_ids([*prompt, *given, *sampled])
        for text, verdict in (("Hello", None), ("Hullo", "prefill")):
            span = TurnSpan(len(prompt), start + len(sampled), 1, True, text, start)
            served = ServedSequence(ids, (span,), [USER, assistant("Hello there.")], [])
            assert template.verifier.check(served) == verdict
