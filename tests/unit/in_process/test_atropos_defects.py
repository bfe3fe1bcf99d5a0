"""What Atropos' `ManagedServer` and `AtroposManagedClient` get wrong: a test for each defect, by
its number; and the types that they publish.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, BaseModel, InternalServerError, NotFoundError
from support.client_scenario import play, saying
from support.hostile import drop_logprob
from support.in_process import check_tokens, in_process, managed, nodes_of, sampled, unmasked
from support.qwen import qwen3_tokenizer
from support.served import USER, numbered, serve, user

from toolroll.endpoint.in_process import (
    AtroposManagedClient,
    ChoiceLogprobs,
    DummyManagedServer,
    EnhancedChatCompletion,
    EnhancedChoice,
    ManagedServer,
    ManagedServerAdapter,
    managed_session,
)
from toolroll.testing import Fault, Reply, load_embedded_tokenizer


def unfinished(*texts: str) -> list[Reply]:
    """Replies without a stop token."""
    return [Reply(text, stop=False) for text in texts]


async def test_b3_a_text_extends_the_longest_whose_tokens_it_keeps() -> None:
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
    siblings = unfinished("Hel", "Hello", " to you.")
    policy = lambda request: siblings[request.index]
    async with managed(policy, tokenizer=tokenizer) as (bench, m):
        await m.completion(prompt="Say:\n", n=2, max_tokens=8)
        await m.completion(prompt="Say:\nHello there,", max_tokens=8)
        short, long = sorted(await bench.trajectories(), key=lambda each: len(each["turns"]))
        assert "Hello there, to you." in tokenizer.decode(long["input_ids"])
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


def trained(masked: Sequence[int], logprobs: Sequence[float], start: int = 0) -> Any:
    """Position, id and logprob of each token with loss."""
    places = enumerate(zip(masked, logprobs, strict=True), start)
    return tuple((n, token, np.float32(value)) for n, (token, value) in places if token != -100)


def answer(prompt: Any, ids: Sequence[int], logprobs: Sequence[float]) -> Any:
    """The ids of a sequence, and what is trained of it."""
    return tuple(map(int, [*prompt, *ids])), trained(ids, logprobs, len(prompt))


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
    assert all(map(unmasked, nodes))
    parts = [trained(node.masked_tokens, node.logprobs) for node in nodes]
    if tree:
        wholes = [tuple(node.tokens) for node in nodes]
        assert Counter(zip(wholes, parts, strict=True)) == Counter(log)
    tokens = [token for _, answered in log for token in answered]
    assert Counter(token for part in parts for token in part) == Counter(tokens)


async def test_c1_a_reply_has_the_tokens_of_its_own_call() -> None:
    """Requested or not: verifiers 0.1.9 (`parse_response_tokens`) requests none of the fields, and
    reads None, without a word, if one of them is missing.
    """
    async with in_process(numbered, split="random") as (bench, client):
        create: Any = client.chat.completions.create
        # conversations of one session, each with nodes from before it
        for text, requested in (("One", {"logprobs": True}), ("Two", {}), ("Three", {})):
            reply = await create(model="m", messages=[user(text)], **requested)
            [choice] = reply.choices
            content, entry = choice.logprobs.content, bench.engine.log[-1]
            logprobs = [token.logprob for token in content]
            check_tokens(entry, reply.prompt_token_ids, choice.token_ids, logprobs)
            assert [token.token_id for token in content] == entry.output_ids
        create = client.completions.create
        completion = await create(model="m", prompt="One", max_tokens=4)
        [choice] = completion.choices
        logprobs = choice.logprobs.token_logprobs
        check_tokens(bench.engine.log[-1], choice.prompt_token_ids, choice.token_ids, logprobs)
        stream = await create(prompt="One", max_tokens=4, stream=True)
        last = [chunk async for chunk in stream][-1].choices[0]
        assert last.prompt_token_ids == bench.engine.log[-1].input_ids.tolist()
        assert last.logprobs.token_logprobs == pytest.approx(bench.engine.log[-1].logprobs)


async def test_logprobs_are_left_out_if_declined_and_over_http() -> None:
    async with in_process(numbered) as (bench, client):
        create: Any = client.chat.completions.create
        plain: Any = bench.client()
        text = {"model": "m", "prompt": "One", "max_tokens": 4}
        answers = [
            await create(model="m", messages=[USER], logprobs=False),
            await plain.chat.completions.create(model="m", messages=[USER]),
            await plain.completions.create(**text),
        ]
        assert [answer.choices[0].logprobs for answer in answers] == [None] * 3
        assert not hasattr(answers[-1].choices[0], "prompt_token_ids")
        extra = {"return_token_ids": True}
        with_ids = await plain.completions.create(**text, n=2, extra_body=extra)
        prompts = [choice.prompt_token_ids for choice in with_ids.choices]
        assert prompts == [with_ids.prompt_token_ids] * 2


async def test_create_needs_no_model() -> None:
    async with in_process(numbered) as (bench, client):
        create: Any = client.chat.completions.create
        for named in ({}, {"model": None}, {"model": "other"}):
            reply = await create(messages=[USER], **named)
            assert reply.model == bench.endpoint.model_name
        text: Any = client.completions.create
        assert (await text(prompt="One", max_tokens=2)).model == bench.endpoint.model_name
        raw: Any = client.copy().chat.completions.with_raw_response.create
        assert (await raw(messages=[USER])).parse().choices[0].message.content == "Reply 4."


async def test_tokenize_in_process_as_verifiers_does() -> None:
    class TokenizeResponse(BaseModel):
        count: int
        max_model_len: int
        tokens: list[int]

    async with in_process(numbered) as (bench, client):
        # verifiers removes the /v1 from the address, as vLLM wants it
        plain = client.copy(base_url=str(client.base_url).replace("/v1/", ""))
        body = {"model": "m", "messages": [USER], "tools": None}
        answer = await plain.post("/tokenize", body=body, cast_to=TokenizeResponse)
        create: Any = client.chat.completions.create
        await create(model="m", messages=[USER])
        assert answer.tokens == bench.engine.log[0].input_ids.tolist()
        with pytest.raises(BadRequestError, match="either messages or prompt"):
            await plain.post("/tokenize", body={"model": "m"}, cast_to=TokenizeResponse)


async def test_the_published_client_returns_the_published_types() -> None:
    async with serve(numbered, split="random") as bench, ManagedServer(bench.served) as m:
        client = AtroposManagedClient(managed_server=m, model="m")
        first = await client.chat.completions.create(
            messages=[USER], max_tokens=5, max_completion_tokens=40, tools=None, stop=None
        )
        history = [USER, first.choices[0].message, USER]
        reply = await client.chat.completions.create(messages=history, n=2)
        assert bench.engine.log[0].sampling_params["max_new_tokens"] == 40
        assert isinstance(reply, EnhancedChatCompletion)
        by_ids = {tuple(entry.output_ids): entry for entry in bench.engine.log[1:]}
        for choice in reply.choices:
            assert isinstance(choice, EnhancedChoice)
            assert isinstance(choice.logprobs, ChoiceLogprobs)
            ids, content = choice.token_ids, choice.logprobs.content
            assert ids is not None and reply.prompt_token_ids is not None
            logprobs = [token.logprob for token in content]
            check_tokens(by_ids[tuple(ids)], reply.prompt_token_ids, ids, logprobs)
            assert [token.token_id for token in content] == ids
        assert reply.model_dump()["choices"][1]["token_ids"] == reply.choices[1].token_ids
        await client.copy().close()
        client.reset()
        assert m.get_state() == {"nodes": []}


async def test_the_published_adapter_calls_the_managed_server() -> None:
    async with serve(numbered) as bench:
        async with ManagedServer(bench.served) as m:
            adapter = ManagedServerAdapter(m, "http://engine/v1")
            chat = await adapter.chat.completions.create(messages=[USER], max_tokens=20)
            text = await adapter.completions.create(prompt="One", max_tokens=4)
            response = await adapter.responses.create(input="Hi")
            texts = [chat.choices[0].message.content, response.output_text]
            assert texts == ["Reply 0.", "Reply 2."]
            assert text.choices[0].text
            assert len(m.get_state()["nodes"]) == 3
        client = AtroposManagedClient(DummyManagedServer(bench.client(), model="m"), "m")
        reply = await client.chat.completions.create(messages=[USER], logprobs=False)
        assert reply.choices[0].message.content == "Reply 3."


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_in_process_have_the_tokens_of_their_call(stream: bool) -> None:
    async with in_process(numbered, split="random") as (bench, client):
        responses: Any = client.responses

        async def create(**fields: Any) -> Any:
            if not stream:
                return await responses.create(**fields)
            events = [event async for event in await responses.create(stream=True, **fields)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            return events[-1].response

        first = await create(input="Hi")
        second = await create(input="And?", previous_response_id=first.id)
        assert [first.output_text, second.output_text] == ["Reply 0.", "Reply 1."]
        for response, entry in zip((first, second), bench.engine.log, strict=True):
            content = response.logprobs["content"]
            logprobs = [token["logprob"] for token in content]
            check_tokens(entry, response.prompt_token_ids, response.token_ids, logprobs)
            assert [token["token_id"] for token in content] == entry.output_ids
        assert (await responses.retrieve(second.id)).output_text == second.output_text
        [trajectory] = await client.trajectories()
        assert len(trajectory.turns) == 2
        with pytest.raises(BadRequestError) as caught:
            await responses.create(input=[])
        assert caught.value.param == "input"
        with pytest.raises(NotFoundError, match="no response 'resp_x'"):
            await responses.retrieve("resp_x")
        over_http: Any = await bench.client("h").responses.create(model="m", input="Hi")
        assert not hasattr(over_http, "token_ids")
