"""Code that was written for Atropos' `ManagedServer` and `DummyManagedServer`, unchanged. A last
message of the assistant, which the model continues (Atropos' prefill).
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from openai import BadRequestError
from support.episodes import call
from support.in_process import managed, nodes_of, sampled, unmasked
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer
from support.served import USER, Message, ServedBench, assistant, serve

from toolroll.endpoint.in_process import DummyManagedServer, ManagedServer, ManagedSession
from toolroll.rollout.errors import ContextOverflowError, EngineError, UsageError
from toolroll.rollout.template.encode import as_ids
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.testing import Fault, load_embedded_tokenizer, reference_logprob


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


async def test_requests_hold_the_servers_semaphore_of_their_split() -> None:
    async with serve() as bench, ManagedServer(api_server(bench)) as m:
        async with m.server.eval_sem:
            evaluated: Any = {"split": "eval", "skip_reasoning": True}
            waiting = asyncio.ensure_future(m.chat_completion(messages=[USER], **evaluated))
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
    replies, tokenizer = ["<think>\nWhat?\n</think>\n\nHello.", "Bye."], qwen3_tokenizer()
    async with (
        serve(lambda request: replies[request.index], tokenizer=tokenizer) as bench,
        ManagedServer(api_server(bench), tokenizer) as m,
    ):
        reply: Any = await m.chat_completion(messages=[USER])
        content = reply.choices[0].message.content
        assert content == replies[0]
        await m.chat_completion(messages=[USER, assistant(content), USER])
        [node] = m.get_state()["nodes"]
        assert unmasked(node) == [index for ids in sampled(bench) for index in ids]


async def test_tools_need_a_parser_and_are_never_left_out_silently() -> None:
    async with serve(call(at="x")) as bench:
        async with ManagedServer(api_server(bench)) as m:
            with pytest.raises(UsageError, match="tool_parser"):
                await m.chat_completion(messages=[USER], tools=[TOOL])
        async with ManagedServer(api_server(bench), tool_parser="hermes") as m:
            fields: Any = {"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}
            answer: Any = await m.chat_completion(**fields)
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


async def test_the_logprobs_are_those_of_the_prompts_own_tokens(tokenizer: Any) -> None:
    closed = [USER, assistant("Hello.")]
    as_text = tokenizer.apply_chat_template(closed, tokenize=False, add_generation_prompt=False)
    async with serve() as bench, ManagedServer(bench.engine.url, "embedded") as m:
        await m.chat_completion(messages=[USER])
        [node] = m.get_state()["nodes"]
        prompts: list[tuple[dict[str, Any], list[int]]] = [
            ({"prompt": "One two three."}, tokenizer.encode("One two three.")),
            ({"messages": [USER]}, bench.engine.log[0].input_ids.tolist()),
            ({"messages": closed}, tokenizer.encode(as_text, add_special_tokens=False)),
            ({"input_ids": node.tokens}, node.tokens),
        ]
        for prompt, ids in prompts:
            scored = await m.get_logprobs(**prompt, top_k=3, split="eval", max_tokens=1)
            assert scored["prompt_tokens"] == ids
            tops = zip(scored["prompt_topk_token_ids"], scored["prompt_topk_logprobs"], strict=True)
            assert next(tops) == ([], [])
            for place, (likeliest, logprobs) in enumerate(tops, 1):
                assert likeliest[0] == ids[place]  # the prompt's own token comes first
                assert len(likeliest) == len(set(likeliest)) == 3
                expected = [reference_logprob(ids[:place], index) for index in likeliest]
                assert logprobs == pytest.approx(expected)
        assert m.get_state()["nodes"] == [node]  # scoring a text trains nothing


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("input_top_logprobs", None, "returned no logprobs"),
        ("input_token_logprobs", lambda rows: rows[::-1], "logprobs of other tokens"),
        ("input_top_logprobs", lambda rows: [None] * len(rows), "no logprobs for a position"),
    ],
)
async def test_missing_logprobs_are_an_error(name: str, change: Any, words: str) -> None:
    def garble(answer: dict[str, Any]) -> dict[str, Any]:
        rows = answer["meta_info"].pop(name)
        answer["meta_info"] |= {name: change(rows)} if change else {}
        return answer

    faults = lambda request: Fault(garble=garble)
    async with serve(faults=faults) as bench, ManagedServer(bench.engine.url, "embedded") as m:
        with pytest.raises(EngineError, match=words):
            await m.get_logprobs(prompt="One two three.")


async def test_what_cannot_be_scored_is_not_sent() -> None:
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({}, UsageError),
        ({"prompt": "x", "input_ids": [1]}, UsageError),
        ({"input_ids": [10**6]}, UsageError),
        ({"prompt": "x", "top_k": 0}, UsageError),
        ({"input_ids": [5] * 64}, ContextOverflowError),
    ]
    async with serve(context_length=64) as bench, ManagedServer(bench.engine.url, "embedded") as m:
        for prompt, kind in refused:
            with pytest.raises(kind):
                await m.get_logprobs(**prompt)
        assert bench.engine.log == []


def prefilled(text: str) -> list[Message]:
    return [USER, assistant(text)]


async def test_the_prompt_is_the_generation_prompt_and_the_text(any_tokenizer: Any) -> None:
    """An environment puts the prefill and the reply together, and goes on: one sequence."""
    tokenizer, replies = any_tokenizer, [" Paris.", "Berlin.", " done."]
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
