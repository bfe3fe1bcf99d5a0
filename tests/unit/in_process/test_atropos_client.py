"""What Atropos' `AtroposManagedClient` gets wrong: a test for each defect that can be tested, by
its number.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, BaseModel, NotFoundError
from support.endpoints import endpoint

from toolroll.endpoint.in_process import (
    AtroposManagedClient,
    ChoiceLogprobs,
    DummyManagedServer,
    EnhancedChatCompletion,
    EnhancedChoice,
    LogprobContent,
    ManagedServer,
    ManagedServerAdapter,
    ManagedSession,
    ToolrollClient,
)
from toolroll.testing import load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}


def said(request: Any) -> str:
    return f"Reply {request.index}."


async def test_c1_a_reply_has_the_tokens_of_its_own_call() -> None:
    async with (
        endpoint(load_embedded_tokenizer(), said, split="random") as bench,
        ToolrollClient(bench.endpoint) as client,
    ):
        # conversations of one session, each with nodes from before it
        for line in ("One", "Two", "Three"):
            reply: Any = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": line}], logprobs=True
            )
            entry = bench.engine.log[-1]
            assert reply.prompt_token_ids == entry.input_ids.tolist()
            assert reply.choices[0].token_ids == entry.output_ids
            content = reply.choices[0].logprobs.content
            assert [token.logprob for token in content] == pytest.approx(entry.logprobs)
            assert [token.token_id for token in content] == entry.output_ids


@pytest.mark.parametrize("tree", [False, True])
async def test_c3_no_choice_is_dropped_whatever_is_tracked(tree: bool) -> None:
    async with endpoint(load_embedded_tokenizer(), said) as bench:
        m = ManagedSession(bench.endpoint, session="s", track_tree=tree)
        reply = await m.client.chat.completions.create(model="m", messages=[USER], n=4)
        assert len(reply.choices) == 4
        assert set(m.get_state()) == ({"sequences", "tree"} if tree else {"nodes"})


async def test_c6_a_limit_of_zero_is_no_limit_left_out() -> None:
    async with (
        endpoint(load_embedded_tokenizer(), said) as bench,
        ToolrollClient(bench.endpoint) as client,
    ):
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(
                model="m", messages=[USER], max_completion_tokens=0, max_tokens=5
            )
        assert caught.value.param == "max_completion_tokens"
        reply = await client.chat.completions.create(
            model="m", messages=[USER], max_completion_tokens=2, max_tokens=5
        )
        assert bench.engine.log[0].sampling_params["max_new_tokens"] == 2
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
            len(bench.engine.log[0].input_ids),
            2,
        )


# --- code that reads a reply as verifiers does ----------------------------------------------------


def response_tokens(response: Any, message_type: str) -> dict[str, list[Any]] | None:
    """What verifiers 0.1.9 reads (`utils/response_utils.py`, `parse_response_tokens`): None,
    without a word, if one of the fields is missing.
    """
    choice = response.choices[0]
    holder = response if message_type == "chat" else choice
    field = "content" if message_type == "chat" else "token_logprobs"
    prompt_ids = getattr(holder, "prompt_token_ids", None)
    ids = getattr(choice, "token_ids", None)
    logprobs = getattr(getattr(choice, "logprobs", None), field, None)
    if prompt_ids is None or ids is None or logprobs is None:
        return None
    values = [it.logprob for it in logprobs] if message_type == "chat" else logprobs
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "completion_logprobs": values}


async def test_verifiers_reads_the_tokens_of_a_reply_that_asked_for_none() -> None:
    async with (
        endpoint(load_embedded_tokenizer(), said, split="random") as bench,
        ToolrollClient(bench.endpoint) as client,
    ):
        replies: list[tuple[Any, str]] = [
            (await client.chat.completions.create(model="m", messages=[USER]), "chat"),
            (await client.completions.create(model="m", prompt="One", max_tokens=4), "completion"),
        ]
        for (reply, kind), entry in zip(replies, bench.engine.log, strict=True):
            found = response_tokens(reply, kind)
            assert found is not None
            assert found["prompt_ids"] == entry.input_ids.tolist()
            assert found["completion_ids"] == entry.output_ids
            assert found["completion_logprobs"] == pytest.approx(entry.logprobs)


async def test_logprobs_are_left_out_if_they_are_declined_and_over_http() -> None:
    async with (
        endpoint(load_embedded_tokenizer(), said) as bench,
        ToolrollClient(bench.endpoint) as client,
    ):
        reply = await client.chat.completions.create(model="m", messages=[USER], logprobs=False)
        assert reply.choices[0].logprobs is None
        plain = bench.client()
        reply = await plain.chat.completions.create(model="m", messages=[USER])
        assert reply.choices[0].logprobs is None
        text: Any = await plain.completions.create(model="m", prompt="One", max_tokens=4)
        assert text.choices[0].logprobs is None
        assert not hasattr(text.choices[0], "prompt_token_ids")
        asked: Any = await plain.completions.create(
            model="m", prompt="One", max_tokens=4, n=2, extra_body={"return_token_ids": True}
        )
        assert [choice.prompt_token_ids for choice in asked.choices] == [asked.prompt_token_ids] * 2


async def test_a_streamed_text_has_the_prompt_in_its_last_choice_if_ids_are_asked_for() -> None:
    async with (
        endpoint(load_embedded_tokenizer(), said) as bench,
        ToolrollClient(bench.endpoint) as client,
    ):
        stream = await client.completions.create(prompt="One", max_tokens=4, stream=True)  # type: ignore[call-overload]
        last = [chunk async for chunk in stream][-1].choices[0]
        assert last.prompt_token_ids == bench.engine.log[0].input_ids.tolist()
        assert last.logprobs.token_logprobs == pytest.approx(bench.engine.log[0].logprobs)


async def test_create_needs_no_model() -> None:
    async with (
        endpoint(load_embedded_tokenizer(), said) as bench,
        ToolrollClient(bench.endpoint) as client,
    ):
        create: Any = client.chat.completions.create
        for named in ({}, {"model": None}, {"model": "other"}):
            reply = await create(messages=[USER], **named)
            assert reply.model == bench.endpoint.model_name
        text: Any = client.completions.create
        assert (await text(prompt="One", max_tokens=2)).model == bench.endpoint.model_name
        raw: Any = client.copy().chat.completions.with_raw_response.create
        assert (await raw(messages=[USER])).parse().choices[0].message.content == "Reply 4."


async def test_tokenize_in_process_as_verifiers_asks_for_it() -> None:
    class TokenizeResponse(BaseModel):
        count: int
        max_model_len: int
        tokens: list[int]

    async with (
        endpoint(load_embedded_tokenizer(), said) as bench,
        ToolrollClient(bench.endpoint) as client,
    ):
        # verifiers removes the /v1 from the address, as vLLM wants it
        plain = client.copy(base_url=str(client.base_url).replace("/v1/", ""))
        body = {"model": "m", "messages": [USER], "tools": None}
        found = await plain.post("/tokenize", body=body, cast_to=TokenizeResponse)
        await client.chat.completions.create(model="m", messages=[USER])
        assert found.tokens == bench.engine.log[0].input_ids.tolist()
        with pytest.raises(BadRequestError, match="either messages or prompt"):
            await plain.post("/tokenize", body={"model": "m"}, cast_to=TokenizeResponse)


# --- the published names --------------------------------------------------------------------------


async def test_the_published_client_returns_the_published_types() -> None:
    async with (
        endpoint(load_embedded_tokenizer(), said, split="random") as bench,
        ManagedServer(bench.served) as managed,
    ):
        client = AtroposManagedClient(managed_server=managed, model="m")
        assert (client.managed_server, client.model) == (managed, "m")
        assert client.base_url == "http://managed-server"
        first = await client.chat.completions.create(
            messages=[USER], max_tokens=5, max_completion_tokens=40, tools=None, stop=None
        )
        history = [USER, first.choices[0].message, USER]
        reply = await client.chat.completions.create(messages=history, n=2)
        assert bench.engine.log[0].sampling_params["max_new_tokens"] == 40
        assert isinstance(reply, EnhancedChatCompletion)
        assert reply.prompt_token_ids == bench.engine.log[1].input_ids.tolist()
        by_ids = {tuple(entry.output_ids): entry for entry in bench.engine.log[1:]}
        for choice in reply.choices:
            assert isinstance(choice, EnhancedChoice)
            assert isinstance(choice.logprobs, ChoiceLogprobs)
            assert choice.token_ids is not None
            entry = by_ids[tuple(choice.token_ids)]
            assert [one.token_id for one in choice.logprobs.content] == choice.token_ids
            assert [one.logprob for one in choice.logprobs.content] == pytest.approx(entry.logprobs)
        assert reply.model_dump()["choices"][1]["token_ids"] == reply.choices[1].token_ids
        assert client.copy() is client
        await client.close()
        client.reset()
        assert managed.get_state() == {"nodes": []}
    token = LogprobContent(logprob=-0.5)
    assert (token.token, token.token_id, token.top_logprobs) == ("", 0, None)
    assert ChoiceLogprobs().content == []
    assert ChoiceLogprobs(content=[token]).content[0].logprob == -0.5


async def test_the_published_adapter_calls_the_managed_server() -> None:
    async with endpoint(load_embedded_tokenizer(), said) as bench:
        async with ManagedServer(bench.served) as managed:
            adapter = ManagedServerAdapter(managed, "http://engine/v1")
            assert adapter.base_url == "http://engine/v1"
            chat = await adapter.chat.completions.create(messages=[USER], max_tokens=20)
            text = await adapter.completions.create(prompt="One", max_tokens=4)
            response = await adapter.responses.create(input="Hi")
            assert [chat.choices[0].message.content, response.output_text] == [
                "Reply 0.",
                "Reply 2.",
            ]
            assert text.choices[0].text
            assert len(managed.get_state()["nodes"]) == 3
        dummy = DummyManagedServer(bench.client(), model="m")
        client = AtroposManagedClient(dummy, "m")
        reply = await client.chat.completions.create(messages=[USER], logprobs=False)
        assert reply.choices[0].message.content == "Reply 3."


# --- Responses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_in_process_have_the_tokens_of_their_call(stream: bool) -> None:
    async with (
        endpoint(load_embedded_tokenizer(), said, split="random") as bench,
        ToolrollClient(bench.endpoint, session="s") as client,
    ):

        async def create(**asked: Any) -> Any:
            if not stream:
                return await client.responses.create(**asked)
            events = [event async for event in await client.responses.create(stream=True, **asked)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            last: Any = events[-1]
            return last.response

        first = await create(input="Hi")
        second = await create(input="And?", previous_response_id=first.id)
        assert [first.output_text, second.output_text] == ["Reply 0.", "Reply 1."]
        for response, entry in zip((first, second), bench.engine.log, strict=True):
            assert response.prompt_token_ids == entry.input_ids.tolist()
            assert response.token_ids == entry.output_ids
            content = response.logprobs["content"]
            assert [token["token_id"] for token in content] == entry.output_ids
            assert [token["logprob"] for token in content] == pytest.approx(entry.logprobs)
        assert (await client.responses.retrieve(second.id)).output_text == second.output_text
        [trajectory] = await client.trajectories()
        assert len(trajectory.turns) == 2
        with pytest.raises(BadRequestError) as caught:
            await client.responses.create(input=[])
        assert caught.value.param == "input"
        with pytest.raises(NotFoundError, match="no response 'resp_x'"):
            await client.responses.retrieve("resp_x")
        over_http: Any = await bench.client("h").responses.create(model="m", input="Hi")
        assert not hasattr(over_http, "token_ids")
