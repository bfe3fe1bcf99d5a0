"""The embedded engine's `/generate`: what SGLang 0.5.23 sends, field for field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.embedded import answer_of, says, session, wired
from support.qwen import qwen3_tokenizer
from support.tiers import costly
from support.wire import Wire

from toolroll.testing import PolicyRequest, Reply, reference_logprob, reference_logprobs

PROMPT = [101, 102, 103, 104, 105, 106, 107, 108, 109]
LOGPROBS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
HELLO, IM_END, TOOL_CALL_END = 9707, 151645, 151658  # Qwen's


@pytest.fixture
def end(tokenizer: Any) -> int:
    return int(tokenizer.convert_tokens_to_ids("<|end|>"))


@pytest.fixture(scope="module")
def qwen() -> Any:
    return qwen3_tokenizer()


# --- the shape ------------------------------------------------------------------------------------


async def test_an_answer_has_the_fields_that_sglang_sends(tokenizer: Any, end: int) -> None:
    """The logprobs only if they were asked for."""
    async with wired(says("Here you are.")) as (_, wire):
        answer = await wire.generate(PROMPT, fields={"rid": "r1"}, max_new_tokens=50)
        plain = await wire.post("/generate", {"input_ids": PROMPT})
    ids, meta = [*tokenizer.encode("Here you are."), end], answer.meta
    n = len(ids)
    expected = {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": end},
        "prompt_tokens": 9,
        "completion_tokens": n,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "dp_rank": None,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": n}],
        "input_token_logprobs": [],
        "output_token_logprobs": [
            [logprob, index, None] for logprob, index in zip(answer.logprobs, ids, strict=True)
        ],
        "output_token_logprobs_length": n,
    }
    times = {name: meta.pop(name) for name in ("e2e_latency", "response_sent_to_client_ts")}
    assert (answer.status, meta) == (200, expected)
    assert answer.body.keys() == {"text", "output_ids", "meta_info"}
    assert (answer.body["text"], answer.output_ids) == ("Here you are.", ids)
    assert times["e2e_latency"] >= 0 and times["response_sent_to_client_ts"] > 1.7e9
    assert plain.output_ids == ids
    assert set(plain.meta) == (meta.keys() | times.keys()) - LOGPROBS


async def test_input_logprobs_begin_without_a_value() -> None:
    async with wired() as (_, wire):
        whole = await wire.generate(PROMPT, fields={"logprob_start_len": 0}, max_new_tokens=1)
        rest = await wire.generate(PROMPT, fields={"logprob_start_len": 6}, max_new_tokens=1)
    items = whole.meta["input_token_logprobs"]
    assert items[0] == [None, PROMPT[0], None]
    assert [item[1] for item in items] == PROMPT
    assert [item[0] for item in items[1:]] == reference_logprobs(PROMPT[:1], PROMPT[1:])
    assert [item[1] for item in rest.meta["input_token_logprobs"]] == PROMPT[6:]


async def test_rescoring_agrees_with_what_was_recorded() -> None:
    async with wired(says("One two three.")) as (_, wire):
        answer = await wire.generate(PROMPT)
        rescored = await wire.rescore(PROMPT + answer.output_ids)
    assert rescored[len(PROMPT) - 1 :] == answer.logprobs


async def test_a_text_prompt_is_encoded(tokenizer: Any) -> None:
    seen: list[PolicyRequest] = []
    text = "<|turn|>user\nHello there.<|end|>"
    async with wired(lambda request: seen.append(request) or "Hm.") as (_, wire):  # type: ignore[func-returns-value]
        answer = await wire.post("/generate", {"text": text})
    assert answer.meta["prompt_tokens"] == len(tokenizer.encode(text))
    assert seen[0].text == text


# --- stops ----------------------------------------------------------------------------------------

SHOWN, UNTRIMMED = {"skip_special_tokens": False}, {"no_stop_trim": True}
END = {"type": "stop", "matched": IM_END}
CLOSED = {"type": "stop", "matched": TOOL_CALL_END}
LO = {"type": "stop", "matched": "lo"}
TWO = {"type": "stop", "matched": "HelloHe"}
CALLS = {"stop_token_ids": [TOOL_CALL_END]}
CALL_ENDS = [TOOL_CALL_END]
IGNORED = {"ignore_eos": True, "max_new_tokens": 4} | SHOWN


def length(count: int) -> dict[str, Any]:
    return {"type": "length", "length": count}


def most(count: int) -> dict[str, Any]:
    return {"max_new_tokens": count}


STOPS: dict[str, tuple[list[int], dict[str, Any], str, list[int], dict[str, Any]]] = {
    "eos": ([IM_END, HELLO], {}, "", [IM_END], END),
    "shown": ([IM_END], SHOWN, "", [IM_END], END),
    "untrimmed": ([IM_END], UNTRIMMED, "", [IM_END], END),
    "shown, untrimmed": ([IM_END], SHOWN | UNTRIMMED, "<|im_end|>", [IM_END], END),
    "id": (CALL_ENDS, CALLS, "", CALL_ENDS, CLOSED),
    "id, untrimmed": (CALL_ENDS, CALLS | UNTRIMMED, "</tool_call>", CALL_ENDS, CLOSED),
    "string": ([HELLO, HELLO], {"stop": ["lo"]}, "Hel", [HELLO], LO),
    "string, untrimmed": ([HELLO], {"stop": ["lo"]} | UNTRIMMED, "Hello", [HELLO], LO),
    "over two tokens": ([HELLO] * 3, {"stop": "HelloHe"}, "", [HELLO] * 2, TWO),
    "ignored eos": ([IM_END] * 9, IGNORED, "<|im_end|>" * 4, [IM_END] * 4, length(4)),
    "nothing": ([HELLO], most(0), "", [], length(0)),
    "length": ([HELLO] * 5, most(3), "HelloHelloHello", [HELLO] * 3, length(3)),
    "stop on the last": ([HELLO, IM_END], most(2), "Hello", [HELLO, IM_END], END),
    "cut before": ([HELLO, IM_END], most(1), "Hello", [HELLO], length(1)),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
async def test_stops_as_the_real_server_does(qwen: Any, stop: tuple[Any, ...]) -> None:
    """The table of what was seen on the real server, with its vocabulary."""
    ids, params, text, sampled, finish = stop
    async with wired(says(ids), tokenizer=qwen) as (_, wire):
        answer = await wire.generate([HELLO], **{"max_new_tokens": 16, **params})
    assert (answer.body["text"], answer.output_ids) == (text, sampled)
    assert answer.meta["finish_reason"] == finish
    assert len(answer.logprobs) == len(sampled)


@pytest.mark.parametrize(
    ("engine", "params", "length"),
    [
        ({}, {}, 128),
        ({}, {"max_new_tokens": None}, 500),
        ({"context_length": 100}, {"max_new_tokens": 91}, 89),
    ],
)
async def test_the_length_has_a_default_and_room_in_the_context(
    engine: dict[str, Any], params: dict[str, Any], length: int
) -> None:
    """The scheduler takes a request that fills the context, and keeps two places of it."""
    answer, _ = await answer_of(says([300] * 500), PROMPT, engine=engine, **params)
    assert len(answer.output_ids) == length
    assert answer.meta["finish_reason"] == {"type": "length", "length": length}


async def test_a_reply_without_a_stop_ends_by_length(tokenizer: Any) -> None:
    answer, _ = await answer_of(says(Reply("Half a sent", stop=False)), PROMPT)
    assert answer.output_ids == tokenizer.encode("Half a sent")
    assert answer.meta["finish_reason"]["type"] == "length"


# nothing of the stop token's own text
words = st.text(st.sampled_from("abc {}\n.é漢"), min_size=1, max_size=40)


@costly(2)
@given(
    text=words,
    stop=words.map(lambda text: text[:3]),
    split=st.sampled_from(["canonical", "random"]),
    seed=st.integers(0, 99),
)
async def test_a_stop_string_cuts_the_text_and_the_ids_after_it(
    tokenizer: Any, text: str, stop: str, split: Any, seed: int
) -> None:
    async with wired(says(text), split=split, seed=seed) as (_, wire):
        answer = await wire.generate(PROMPT, stop=["\x00never", stop], max_new_tokens=500)
        whole = await wire.generate(PROMPT, max_new_tokens=500)
    if stop not in text:
        assert (answer.body["text"], answer.meta["finish_reason"]["type"]) == (text, "stop")
        assert answer.meta["finish_reason"]["matched"] == tokenizer.eos_token_id
        return
    assert answer.meta["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer.body["text"] == text[: text.index(stop)]
    ids = answer.output_ids
    assert stop in tokenizer.decode(ids) and stop not in tokenizer.decode(ids[:-1])
    if split == "canonical":
        assert ids == whole.output_ids[: len(ids)]


async def test_a_stop_string_in_the_stop_tokens_own_text_matches_first(end: int) -> None:
    answer, _ = await answer_of(says("Fine."), PROMPT, stop=["<|e"])
    assert answer.meta["finish_reason"] == {"type": "stop", "matched": "<|e"}
    assert (answer.output_ids[-1], answer.body["text"]) == (end, "Fine.")


async def test_n_answers_have_ids_of_their_own() -> None:
    async with wired(lambda request: f"Answer {request.call}.") as (engine, wire):
        answer = await wire.generate(PROMPT, fields={"rid": "mine"}, **session("s"), n=3)
    assert isinstance(answer.body, list)
    assert [each["text"] for each in answer.body] == ["Answer 0.", "Answer 1.", "Answer 2."]
    rids = {each["meta_info"]["id"] for each in answer.body}
    assert len(rids) == 3 and "mine" not in rids
    assert {entry.rid for entry in engine.log} == rids


async def test_a_batch_is_answered_in_order() -> None:
    prompts = [[300] * 4, [301] * 7, [302] * 2]
    async with wired() as (_, wire):
        answer = await wire.post("/generate", {"input_ids": prompts, "rid": ["a", "b", "c"]})
        one = await wire.post("/generate", {"input_ids": prompts[:1]})
        texts = await wire.post("/generate", {"text": ["Hello there.", "Hello."]})
    assert [each["text"] for each in answer.body] == [f"I have read {n} tokens." for n in (4, 7, 2)]
    assert [each["meta_info"]["id"] for each in answer.body] == ["a", "b", "c"]
    assert isinstance(one.body, list) and len(one.body) == 1
    assert len(texts.body) == 2


async def test_an_async_policy_does_not_stop_the_others() -> None:
    gate = asyncio.Event()

    async def policy(request: PolicyRequest) -> str:
        if request.routing_key == "slow":
            await gate.wait()
        return request.routing_key

    async with wired(policy) as (_, wire):
        slow = asyncio.create_task(wire.generate(PROMPT, **session("slow")))
        quick = await wire.generate(PROMPT, **session("quick"))
        assert quick.body["text"] == "quick" and not slow.done()
        gate.set()
        assert (await slow).body["text"] == "slow"


async def test_cached_tokens_as_the_real_server_counts_them() -> None:
    """9 tokens again: 8. Turn 2 of 9 + 41 + 5: 49. Rescoring from 0: none."""
    async with wired(says([400 + at for at in range(41)])) as (_, wire):
        first = await wire.generate(PROMPT)
        again = await wire.generate(PROMPT, max_new_tokens=1)
        longer = [*PROMPT, *first.output_ids, *range(1000, 1005)]
        second = await wire.generate(longer, max_new_tokens=1)
        rescored = await wire.generate(PROMPT, fields={"logprob_start_len": 0}, max_new_tokens=1)
    cached = [answer.meta["cached_tokens"] for answer in (first, again, second, rescored)]
    assert cached == [0, 8, 49, 0]


async def events(wire: Wire, body: dict[str, Any]) -> list[Any]:
    async with wire.http.post(f"{wire.url}/generate", json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        chunks = (await response.text()).split("\n\n")
    assert chunks[-2:] == ["data: [DONE]", ""]
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-2]]


async def test_a_stream_is_cumulative_and_ends_in_the_whole_answer(end: int) -> None:
    async with wired(says("One two three.")) as (_, wire):
        parts = await events(wire, {"input_ids": PROMPT, "return_logprob": True})
        whole = await wire.generate(PROMPT)
    assert len(parts) == len(whole.output_ids)
    for at, part in enumerate(parts, 1):
        assert part["output_ids"] == whole.output_ids[:at]
        items = part["meta_info"]["output_token_logprobs"]
        assert [item[0] for item in items] == whole.logprobs[:at]
        assert whole.body["text"].startswith(part["text"])
    assert all(part["meta_info"]["finish_reason"] is None for part in parts[:-1])
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert parts[-1]["text"] == "One two three."


async def test_a_streams_refusal_is_a_200_with_an_error_in_it() -> None:
    async with wired(context_length=64) as (engine, wire):
        [event] = await events(wire, {"input_ids": [300] * 64})
    assert event["error"]["code"] == 400 and event["error"]["retryable"] is False
    assert "longer than the model's context length (64 tokens)" in event["error"]["message"]
    assert engine.log[0].status == 400


async def test_a_logprob_depends_on_nothing_but_the_prefix_and_the_id(tokenizer: Any) -> None:
    """Not on the engine, its seed, the parameters, nor on earlier requests."""
    ids = tokenizer.encode("The same words again.")
    first, _ = await answer_of(says(ids), PROMPT, temperature=1.0)
    other = {"seed": 9, "weight_version": "w7", "split": "random"}
    async with wired(says([*PROMPT, *ids]), **other) as (_, wire):
        await wire.generate(PROMPT[:3])
        second = await wire.generate([PROMPT[0]], temperature=0.3, top_k=5)
        third = await wire.generate(PROMPT + ids[:2])
    assert first.logprobs == [
        reference_logprob(PROMPT + ids[:at], index) for at, index in enumerate(ids)
    ]
    assert second.logprobs[0] == reference_logprob([PROMPT[0]], PROMPT[0])
    assert third.logprobs == reference_logprobs(PROMPT + ids[:2], [*PROMPT, *ids])
