"""What the embedded engine refuses, in SGLang 0.5.23's own words."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.embedded import Held, answer_of, held_call, says, session, wired

CONTEXT = {"context_length": 4096}
LONGER = "is longer than the model's context length (4096 tokens)"
ASKED = "Requested token count exceeds the model's maximum context length of 4096 tokens. You"
OVERFLOWS: list[tuple[int, dict[str, Any], str]] = [
    (5000, {}, f"The input (5000 tokens) {LONGER}"),
    (4096, {"max_new_tokens": 1}, f"The input (4096 tokens) {LONGER}."),
    (4095, {"max_new_tokens": 8}, f"{ASKED} requested a total of 4103 tokens: 4095 "),
    (4090, {"max_new_tokens": 1},
     "Input length (4090 tokens) exceeds the maximum allowed length (4090 tokens)."),
]  # fmt: skip


@pytest.mark.parametrize(("length", "params", "words"), OVERFLOWS)
async def test_an_overflow_is_a_400(length: int, params: dict[str, Any], words: str) -> None:
    answer, log = await answer_of(prompt=[300] * length, engine=CONTEXT, **params)
    assert (answer.status, answer.body) == (400, {"error": {"message": answer.message}})
    assert answer.message.startswith(words)
    assert [(entry.status, entry.output_ids) for entry in log] == [(400, [])]


async def test_a_request_that_just_fits_is_answered() -> None:
    longest, _ = await answer_of(says([300] * 99), [300] * 4089, engine=CONTEXT, max_new_tokens=7)
    assert (longest.status, len(longest.output_ids)) == (200, 5)


IDS = {"input_ids": [300]}
INVALID = "1 validation error: "
EMPTY = "text must have at least one token"
PARAMS: list[tuple[Any, str]] = [
    ({"bogus": 1}, "unknown field `bogus`, expected one of `max_new_tokens`, `stop`"),
    ({"max_tokens": 3}, "unknown field `max_tokens`"),
    ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
    ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
    ({"max_new_tokens": -2}, "max_new_tokens must be at least 0, got -2."),
    ({"n": -1}, "n must be at least 1, got -1."),
    ("warm", f"{INVALID}sampling_params must be an object"),
    ({"temperature": "warm"}, f"{INVALID}sampling_params.temperature must be a number"),
    ({"n": "2"}, f"{INVALID}sampling_params.n must be an integer"),
    ({"n": 2.0}, f"{INVALID}sampling_params.n must be an integer"),
    ({"sampling_seed": "x"}, f"{INVALID}sampling_params.sampling_seed must be an integer"),
    ({"stream_interval": "x"}, f"{INVALID}sampling_params.stream_interval must be a"),
    ({"stop": [5]}, f"{INVALID}sampling_params.stop must be a string or a list of"),
    ({"stop": 5}, f"{INVALID}sampling_params.stop must be a string or a list of"),
    ({"stop_token_ids": 5}, f"{INVALID}sampling_params.stop_token_ids must be a list"),
]
WRONG: list[dict[str, Any]] = [
    {},
    {"input_ids": []},
    {"input_ids": [[]]},
    {"input_ids": [1, "two"]},
    {"input_ids": [1.5]},
    {"input_ids": [[1, 2], 3]},
    {"input_ids": [[1, 2], [3]], "rid": ["only one"]},
    {"text": 5},
    {**IDS, "top_logprobs_num": -1},
    {**IDS, "top_logprobs_num": "x"},
    {**IDS, "logprob_start_len": "x"},
    {**IDS, "logprob_start_len": -2},
]
BODIES = [
    *(({**IDS, "sampling_params": params}, words) for params, words in PARAMS),
    *((body, INVALID) for body in WRONG),
    *(({"text": text}, EMPTY) for text in ("", ["Hello.", ""])),
    ({**IDS, "stream": True, "sampling_params": {"n": 2}}, "stream"),
]


@pytest.mark.parametrize(("body", "words"), BODIES)
async def test_a_wrong_body_is_a_400(body: dict[str, Any], words: str) -> None:
    async with wired() as (engine, wire):
        answer = await wire.post("/generate", body)
    assert answer.status == 400
    assert words in answer.message
    if words.startswith("unknown field"):
        assert isinstance(answer.body["error"], str)
    if words == INVALID:
        assert set(answer.body) == {"object", "message", "type", "param", "code"}
    assert engine.log == []  # no prompt of it ever came to the engine


async def test_an_unknown_field_is_ignored() -> None:
    assert (await answer_of(fields={"bogus": 1}))[0].status == 200


PATHS = ("/generate", "/tokenize", "/abort_request", "/update_weights_from_disk")
NOT_ALLOWED = "Only 'application/json' is allowed"
TEXTS = [("/generate", "application/json", data, "") for data in (b"{", b"[1]", b"\xff")]
for kind in ("application/octet-stream", "text/plain"):
    TEXTS += [(path, kind, b"{}", NOT_ALLOWED) for path in PATHS]


@pytest.mark.parametrize(("path", "kind", "data", "words"), TEXTS)
async def test_a_body_without_json_is_a_400(path: str, kind: str, data: bytes, words: str) -> None:
    async with (
        wired() as (engine, wire),
        wire.http.post(engine.url + path, data=data, headers={"Content-Type": kind}) as response,
    ):
        assert response.status == 400
        assert words in await response.text()
    assert engine.log == []


@pytest.mark.parametrize("index", [4096, 999_999, -1, 2**31, 2**40])
async def test_an_id_outside_the_vocabulary_would_have_killed_it(index: int) -> None:
    async with wired() as (engine, wire):
        for ids, status in (([300, index], 500), ([300, 4095], 200)):
            assert (await wire.generate(ids)).status == status
    assert engine.killed == 1
    assert [entry.status for entry in engine.log] == [500, 200]


async def test_a_rid_may_not_come_twice_at_once() -> None:
    policy, same = Held([300, 301], after=1), {"fields": {"rid": "dup"}}
    async with wired(policy) as (engine, wire):
        first = await held_call(engine, wire.generate([300], **same))
        second = await wire.generate([300], **same)
        policy.release()
        assert [(await first).status, (await wire.generate([300], **same)).status] == [200, 200]
    assert (second.status, second.message) == (400, "Duplicate request ID detected: dup")


async def test_a_full_queue_is_a_503() -> None:
    policy = Held([300, 301], after=1)
    async with wired(policy, max_running=1, max_queued=1) as (engine, wire):
        running = await held_call(engine, wire.generate([300]))
        queued = asyncio.create_task(wire.generate([301]))
        await engine.until(lambda engine: len(engine.log) == 2)
        refused = await wire.generate([302])
        policy.release()
        assert [(await task).status for task in (running, queued)] == [200, 200]
    message = {"message": "The request queue is full.", "type": "503", "code": 503}
    assert (refused.status, refused.body) == (503, {"object": "error", "param": None, **message})


async def test_a_policys_own_mistake_is_a_500_and_the_engine_goes_on() -> None:
    async with wired(lambda request: {"good": "Fine."}[request.routing_key]) as (engine, wire):
        statuses = [
            (await wire.generate([300], **session(name))).status for name in ("bad", "good")
        ]
    assert statuses == [500, 200] == [entry.status for entry in engine.log]
