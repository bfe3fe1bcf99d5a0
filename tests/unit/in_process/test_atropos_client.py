"""What Atropos' `AtroposManagedClient` gets wrong: a test for each defect, by its number."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, BaseModel, NotFoundError
from support.in_process import check_tokens, in_process
from support.served import USER, numbered, serve, user

from toolroll.endpoint.in_process import (
    AtroposManagedClient,
    ChoiceLogprobs,
    DummyManagedServer,
    EnhancedChatCompletion,
    EnhancedChoice,
    LogprobContent,
    ManagedServer,
    ManagedServerAdapter,
)


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
        completion: Any = await client.completions.create(model="m", prompt="One", max_tokens=4)
        [choice] = completion.choices
        logprobs = choice.logprobs.token_logprobs
        check_tokens(bench.engine.log[-1], choice.prompt_token_ids, choice.token_ids, logprobs)


async def test_c6_a_limit_of_zero_is_no_limit_left_out() -> None:
    async with in_process(numbered) as (bench, client):
        create: Any = client.chat.completions.create
        limits = {"max_completion_tokens": 0, "max_tokens": 5}
        with pytest.raises(BadRequestError) as caught:
            await create(model="m", messages=[USER], **limits)
        assert caught.value.param == "max_completion_tokens"
        limits["max_completion_tokens"] = 2
        usage = (await create(model="m", messages=[USER], **limits)).usage
        [entry] = bench.engine.log
        assert entry.sampling_params["max_new_tokens"] == 2
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(entry.input_ids), 2)


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


async def test_a_streamed_text_has_the_prompt_in_its_last_choice() -> None:
    async with in_process(numbered) as (bench, client):
        create: Any = client.completions.create
        stream = await create(prompt="One", max_tokens=4, stream=True)
        last = [chunk async for chunk in stream][-1].choices[0]
        [entry] = bench.engine.log
        assert last.prompt_token_ids == entry.input_ids.tolist()
        assert last.logprobs.token_logprobs == pytest.approx(entry.logprobs)


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
        named = (client.managed_server, client.model, client.base_url)
        assert named == (m, "m", "http://managed-server")
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
        assert client.copy() is client
        await client.close()
        client.reset()
        assert m.get_state() == {"nodes": []}
    token = LogprobContent(logprob=-0.5)
    assert (token.token, token.token_id, token.top_logprobs) == ("", 0, None)
    assert ChoiceLogprobs().content == []
    assert ChoiceLogprobs(content=[token]).content[0].logprob == -0.5


async def test_the_published_adapter_calls_the_managed_server() -> None:
    async with serve(numbered) as bench:
        async with ManagedServer(bench.served) as m:
            adapter = ManagedServerAdapter(m, "http://engine/v1")
            assert adapter.base_url == "http://engine/v1"
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
