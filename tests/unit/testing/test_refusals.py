"""What the embedded engine refuses, in SGLang 0.5.23's own words."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.embedded import Held, held_call, says, session, wired

CONTEXT = 4096
LONGER = "is longer than the model's context length (4096 tokens)"
ASKED = "Requested token count exceeds the model's maximum context length of 4096 tokens. You"
OVERFLOWS = [
    (5000, None, f"The input (5000 tokens) {LONGER}"),
    (4096, 1, f"The input (4096 tokens) {LONGER}."),
    (4095, 8, f"{ASKED} requested a total of 4103 tokens: 4095 "),
    (4090, 1, "Input length (4090 tokens) exceeds the maximum allowed length (4090 tokens)."),
]


WRONG = "1 validation error: sampling_params"


@pytest.mark.parametrize(("length", "max_new_tokens", "words"), OVERFLOWS)
async def test_an_overflow_is_a_400(
    tokenizer: Any, length: int, max_new_tokens: int | None, words: str
) -> None:
    params = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    async with wired(tokenizer, context_length=CONTEXT) as (engine, wire):
        answer = await wire.generate([300] * length, **params)  # type: ignore[arg-type]
    assert answer.status == 400
    assert list(answer.body) == ["error"] and list(answer.body["error"]) == ["message"]
    assert answer.message.startswith(words)
    assert [(entry.status, entry.output_ids) for entry in engine.log] == [(400, [])]


async def test_a_request_that_just_fits_is_answered(tokenizer: Any) -> None:
    async with wired(tokenizer, says([300] * 99), context_length=CONTEXT) as (_, wire):
        longest = await wire.generate([300] * 4089, max_new_tokens=7)
    assert (longest.status, len(longest.output_ids)) == (200, 5)


@pytest.mark.parametrize(
    ("sampling_params", "words"),
    [
        ({"bogus": 1}, "unknown field `bogus`, expected one of `max_new_tokens`, `stop`"),
        ({"max_tokens": 3}, "unknown field `max_tokens`"),
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"max_new_tokens": -2}, "max_new_tokens must be at least 0, got -2."),
        ({"n": -1}, "n must be at least 1, got -1."),
        ("warm", f"{WRONG} must be an object"),
        ({"temperature": "warm"}, f"{WRONG}.temperature must be a number"),
        ({"n": "2"}, f"{WRONG}.n must be an integer"),
        ({"n": 2.0}, f"{WRONG}.n must be an integer"),
        ({"sampling_seed": "x"}, f"{WRONG}.sampling_seed must be an integer"),
        ({"stream_interval": "x"}, f"{WRONG}.stream_interval must be a"),
        ({"stop": [5]}, f"{WRONG}.stop must be a string or a list of"),
        ({"stop": 5}, f"{WRONG}.stop must be a string or a list of"),
        ({"stop_token_ids": 5}, f"{WRONG}.stop_token_ids must be a list"),
    ],
)
async def test_a_wrong_sampling_parameter_is_a_400(
    tokenizer: Any, sampling_params: Any, words: str
) -> None:
    async with wired(tokenizer) as (engine, wire):
        body = {"input_ids": [300], "sampling_params": sampling_params}
        answer = await wire.post("/generate", body)
    assert answer.status == 400
    assert answer.message.startswith(words)
    if words.startswith("unknown field"):
        assert isinstance(answer.body["error"], str)
    assert engine.log == []  # no prompt of it ever came to the engine


async def test_an_unknown_field_is_ignored(tokenizer: Any) -> None:
    async with wired(tokenizer) as (_, wire):
        answer = await wire.generate([300], fields={"bogus": 1})
    assert answer.status == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_ids": []},
        {"input_ids": [[]]},
        {"input_ids": [1, "two"]},
        {"input_ids": [1.5]},
        {"input_ids": [[1, 2], 3]},
        {"input_ids": [[1, 2], [3]], "rid": ["only one"]},
        {"text": 5},
        {"input_ids": [1], "top_logprobs_num": -1},
        {"input_ids": [1], "top_logprobs_num": "x"},
        {"input_ids": [1], "logprob_start_len": "x"},
        {"input_ids": [1], "logprob_start_len": -2},
    ],
)
async def test_a_body_of_the_wrong_types_is_a_validation_error(tokenizer: Any, body: Any) -> None:
    async with wired(tokenizer) as (engine, wire):
        answer = await wire.post("/generate", body)
    assert answer.status == 400
    assert set(answer.body) == {"object", "message", "type", "param", "code"}
    assert answer.message.startswith("1 validation error: ")
    assert engine.log == []


PATHS = ("/generate", "/tokenize", "/abort_request", "/update_weights_from_disk")
NOT_ALLOWED = "Only 'application/json' is allowed"
BODIES = [("/generate", "application/json", data, "") for data in (b"{", b"[1]", b"\xff")]
for kind in ("application/octet-stream", "text/plain"):
    BODIES += [(path, kind, b"{}", NOT_ALLOWED) for path in PATHS]


@pytest.mark.parametrize(("path", "kind", "data", "words"), BODIES)
async def test_a_body_that_is_no_json_is_a_400(
    tokenizer: Any, path: str, kind: str, data: bytes, words: str
) -> None:
    async with (
        wired(tokenizer) as (engine, wire),
        wire.http.post(engine.url + path, data=data, headers={"Content-Type": kind}) as response,
    ):
        assert response.status == 400
        assert words in await response.text()
    assert engine.log == []


@pytest.mark.parametrize("index", [4096, 999_999, -1, 2**31, 2**40])
async def test_an_id_outside_the_vocabulary_would_have_killed_it(
    tokenizer: Any, index: int
) -> None:
    async with wired(tokenizer) as (engine, wire):
        answer = await wire.generate([300, index])
        good = await wire.generate([300, 4095])
    assert (answer.status, good.status) == (500, 200)
    assert engine.killed == 1
    assert [entry.status for entry in engine.log] == [500, 200]


async def test_a_rid_may_not_come_twice_at_once(tokenizer: Any) -> None:
    policy = Held([300, 301], after=1)
    async with wired(tokenizer, policy) as (engine, wire):
        first = await held_call(engine, wire.generate([300], fields={"rid": "dup"}))
        second = await wire.generate([300], fields={"rid": "dup"})
        policy.release()
        assert (await first).status == 200
        assert (await wire.generate([300], fields={"rid": "dup"})).status == 200
    assert (second.status, second.message) == (400, "Duplicate request ID detected: dup")


async def test_a_full_queue_is_a_503(tokenizer: Any) -> None:
    policy = Held([300, 301], after=1)
    async with wired(tokenizer, policy, max_running=1, max_queued=1) as (engine, wire):
        running = await held_call(engine, wire.generate([300]))
        queued = asyncio.create_task(wire.generate([301]))
        await engine.until(lambda engine: len(engine.log) == 2)
        refused = await wire.generate([302])
        policy.release()
        assert [(await task).status for task in (running, queued)] == [200, 200]
    message = {"message": "The request queue is full.", "type": "503", "code": 503}
    assert (refused.status, refused.body) == (503, {"object": "error", "param": None, **message})


async def test_a_policys_own_mistake_is_a_500_and_the_engine_goes_on(tokenizer: Any) -> None:
    def policy(request: Any) -> str:
        return {"good": "Fine."}[request.routing_key]

    async with wired(tokenizer, policy) as (engine, wire):
        bad = await wire.generate([300], **session("bad"))
        good = await wire.generate([300], **session("good"))
    assert (bad.status, good.status) == (500, 200)
    assert [entry.status for entry in engine.log] == [500, 200]


async def test_a_stream_of_several_answers_is_refused(tokenizer: Any) -> None:
    async with wired(tokenizer) as (_, wire):
        answer = await wire.generate([300], fields={"stream": True}, n=2)
    assert answer.status == 400 and "stream" in answer.message
