"""The embedded engine's `/generate`: what SGLang 0.5.23 sends, field for field, and refuses."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.embedded import Held, answer_of, events, held_call, says, session, wired
from support.qwen import qwen3_tokenizer
from support.tiers import costly

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
    logprobs = [None, *reference_logprobs(PROMPT[:1], PROMPT[1:])]
    assert items == [[*pair, None] for pair in zip(logprobs, PROMPT, strict=True)]
    assert [item[1] for item in rest.meta["input_token_logprobs"]] == PROMPT[6:]


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
async def test_the_length_has_a_default_and_a_limit(engine: Any, params: Any, length: int) -> None:
    """The scheduler takes a request that fills the context, and keeps two places of it."""
    answer, _ = await answer_of(says([300] * 500), PROMPT, engine=engine, **params)
    assert len(answer.output_ids) == length
    assert answer.meta["finish_reason"] == {"type": "length", "length": length}


async def test_a_reply_without_a_stop_ends_by_length(tokenizer: Any) -> None:
    answer, _ = await answer_of(says(Reply("Half a sent", stop=False)), PROMPT)
    assert answer.output_ids == tokenizer.encode("Half a sent")
    assert answer.meta["finish_reason"]["type"] == "length"


async def test_a_stop_string_in_the_stop_tokens_own_text_matches_first(end: int) -> None:
    answer, _ = await answer_of(says("Fine."), PROMPT, stop=["<|e"])
    assert answer.meta["finish_reason"] == {"type": "stop", "matched": "<|e"}
    assert (answer.output_ids[-1], answer.body["text"]) == (end, "Fine.")


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


async def test_a_stream_is_cumulative_and_ends_in_the_whole_answer(end: int) -> None:
    async with wired(says("One two three.")) as (_, wire):
        parts = [part async for part in events(wire, PROMPT)]
        whole = await wire.generate(PROMPT)
    assert len(parts) == len(whole.output_ids)
    for count, part in enumerate(parts, 1):
        assert part["output_ids"] == whole.output_ids[:count]
        items = part["meta_info"]["output_token_logprobs"]
        assert [item[0] for item in items] == whole.logprobs[:count]
        assert whole.body["text"].startswith(part["text"])
    assert all(part["meta_info"]["finish_reason"] is None for part in parts[:-1])
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert parts[-1]["text"] == "One two three."


async def test_a_streams_refusal_is_a_200_with_an_error_in_it() -> None:
    async with wired(context_length=64) as (engine, wire):
        [event] = [event async for event in events(wire, [300] * 64)]
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


# --- what is refused, in SGLang 0.5.23's own words ------------------------------------------------


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
    assert [(entry.status, entry.call, entry.output_ids) for entry in log] == [(400, None, [])]


async def test_a_request_that_just_fits_is_answered() -> None:
    longest, _ = await answer_of(says([300] * 99), [300] * 4089, engine=CONTEXT, max_new_tokens=7)
    assert (longest.status, len(longest.output_ids)) == (200, 5)


IDS = {"input_ids": [300]}
INVALID = "1 validation error: "
EMPTY = "text must have at least one token"
PARAMS: list[tuple[Any, str]] = [
    ({"bogus": 1}, "unknown field `bogus`, expected one of `max_new_tokens`, `stop`"),
    ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
    ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
    ({"max_new_tokens": -2}, "max_new_tokens must be at least 0, got -2."),
    ({"n": -1}, "n must be at least 1, got -1."),
    ("warm", f"{INVALID}sampling_params must be an object"),
    ({"temperature": "warm"}, f"{INVALID}sampling_params.temperature must be a number"),
    ({"n": "2"}, f"{INVALID}sampling_params.n must be an integer"),
    ({"sampling_seed": "x"}, f"{INVALID}sampling_params.sampling_seed must be an integer"),
    ({"stream_interval": "x"}, f"{INVALID}sampling_params.stream_interval must be a"),
    ({"stop": [5]}, f"{INVALID}sampling_params.stop must be a string or a list of"),
    ({"stop_token_ids": 5}, f"{INVALID}sampling_params.stop_token_ids must be a list"),
]
WRONG: list[dict[str, Any]] = [
    {},
    {"input_ids": []},
    {"input_ids": [1.5]},
    {"input_ids": [[1, 2], 3]},
    {"input_ids": [[1, 2], [3]], "rid": ["only one"]},
    {"text": 5},
    {**IDS, "top_logprobs_num": -1},
    {**IDS, "logprob_start_len": "x"},
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
    """An unknown field is ignored."""
    async with wired(lambda request: {"good": "Fine."}[request.routing_key]) as (engine, wire):
        bad, good = [
            await wire.generate([300], fields={"bogus": 1}, **session(name))
            for name in ("bad", "good")
        ]
    assert [bad.status, good.status] == [500, 200] == [entry.status for entry in engine.log]
