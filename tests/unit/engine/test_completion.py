"""`parse_completion`: an answer is kept as it is, and refused if it contradicts itself, or if no
honest engine gives it.
"""

import math
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from support.client import INFO, Pauses, answering, client_of, flaky, request
from support.hostile import ASKED, HOSTILE, IDS, RID, honest
from support.http import completion

from toolroll.rollout.engine import ModelInfo, parse_completion
from toolroll.rollout.engine.stream import EventReader
from toolroll.rollout.errors import CompletionError, EngineError, TokenError
from toolroll.rollout.media import Image
from toolroll.rollout.types import GenerateRequest, WeightVersion

pytestmark = pytest.mark.tokens

REQUEST = GenerateRequest(np.array([1, 2, 3], dtype=np.int32), {}, "s")
LOGPROB = st.floats(-50, 0, width=32)
SAMPLED_ID = st.tuples(st.integers(0, 2**31 - 2), LOGPROB)
SAMPLED = st.lists(SAMPLED_ID, min_size=1, max_size=50)


def body(sampled: list[tuple[int, float]], **meta: Any) -> dict[str, Any]:
    ids = [index for index, _ in sampled]
    items = [[value, index, None] for index, value in sampled]
    made = completion(ids, output_token_logprobs=items, prompt_tokens=3, **meta)
    return dict(orjson.loads(orjson.dumps(made)))


@given(sampled=SAMPLED)
@example(sampled=[(7, float(np.float32(5e-4)))])  # rounding: bf16 logits may end a hair above zero
def test_ids_and_logprobs_come_through_bit_for_bit(sampled: list[tuple[int, float]]) -> None:
    """As writable arrays: tensors are made of them without a copy."""
    answer = parse_completion(body(sampled), REQUEST)
    assert answer.output_ids.dtype == np.int32 and answer.output_ids.flags.writeable
    assert answer.output_ids.tolist() == [index for index, _ in sampled]
    assert answer.logprobs is not None and answer.logprobs.flags.writeable
    assert answer.logprobs.dtype == np.float32
    assert answer.logprobs.tolist() == [value for _, value in sampled]


READ: dict[str, tuple[Any, str | None]] = {
    "the same": ([1, 2, 3], None),
    "another id": ([1, 2, 4], "read 3 tokens, expected 3; token 2 differs"),
    "fewer": ([1, 2], "read 2 tokens, expected 3; token 2 differs"),
    "nothing": (None, "did not return prompt_token_ids"),
}


@pytest.mark.parametrize(("read", "difference"), READ.values(), ids=READ)
def test_with_images_the_ids_that_were_read_are_compared(read: Any, difference: str | None) -> None:
    answer = {**body([(5, -1.0)]), "prompt_token_ids": read}
    answer["meta_info"]["prompt_tokens"] = 9  # what the engine read, which is compared by its ids
    asked = GenerateRequest(REQUEST.input_ids, {}, "s", images=(Image(1, 1, "ab"),))
    found = parse_completion(answer, asked).other_prompt
    assert found is difference is None or (difference or "") in (found or "")
    with pytest.raises(CompletionError, match="a prompt of 9 tokens"):
        parse_completion(answer, REQUEST)


TAILS: list[list[Any]] = [[], [None], ["text"], [None, 7], [None, -0.5, 7]]
"""What may follow a logprob and its id. In the last, an id is where the next logprob would be."""


@given(SAMPLED, st.lists(st.sampled_from(TAILS), min_size=50, max_size=50), st.booleans())
def test_items_of_other_lengths_are_read_alike(sampled: Any, tails: Any, mixed: bool) -> None:
    answer = body(sampled)
    chosen = tails if mixed else tails[:1] * 50
    items = [[value, index, *tail] for tail, (index, value) in zip(chosen, sampled, strict=False)]
    answer["meta_info"]["output_token_logprobs"] = items
    logprobs = parse_completion(answer, REQUEST).logprobs
    assert logprobs is not None and logprobs.tolist() == [value for _, value in sampled]
    items[0][1] ^= 1
    words = f"logprob 0 belongs to token {items[0][1]}, output_ids has {sampled[0][0]} there"
    with pytest.raises(CompletionError, match=words):
        parse_completion(answer, REQUEST)


def spans(*ends: tuple[Any, Any]) -> dict[str, Any]:
    return {
        "weight_versions": [{"version": "a", "start": start, "end": end} for start, end in ends]
    }


def logprobs(second: Any, first: Any = -0.25) -> dict[str, Any]:
    """The items of two tokens, 7 and 8: `second`, behind one with the logprob `first`."""
    return {"output_token_logprobs": [[first, 7, None], second]}


NO_ITEMS: list[Any] = [None, 8, "abc", [], [-0.5], {}, {"a": 1, "b": 2, "c": 3}, [None, 8, None]]
NO_ITEMS += [["-0.5", 8, None], [[-0.5], 8, None], [-(10**400), 8]]
NO_ITEM = r"is not \[logprob, id, text\] with a number first"
NO_SPAN = "a weight version is not a span with version, start and end"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"output_token_logprobs": 5}, "cannot be read"),
    ({"output_top_logprobs": [5, 5]}, "cannot be read"),
    *((logprobs(item), NO_ITEM) for item in NO_ITEMS),
    *((logprobs([-0.5, other, None]), "logprob 1 belongs to token") for other in ("8", 8.5, [8])),
    (logprobs([-0.5, 8, None], first=0.0011), "a logprob is NaN or above zero"),
    ({"weight_versions": 7}, "cannot be read"),
    ({"weight_versions": ["v"]}, NO_SPAN),
    (spans((math.inf, 2)), NO_SPAN),
    (spans((0, 1)), "cover 1 of 2"),
    (spans((0, 2), (0, 2)), "gap or overlap at token 2"),
]
"""What `support.hostile` does not have."""


@pytest.mark.parametrize(("meta", "words"), REFUSED, ids=repr)
def test_a_contradiction_is_refused_in_words(meta: dict[str, Any], words: str) -> None:
    with pytest.raises(CompletionError, match=words):
        parse_completion(completion([7, 8], **meta), REQUEST)


def test_no_ids_are_an_empty_list() -> None:
    answer = completion([], prompt_tokens=3, output_token_logprobs=None, weight_versions=None)
    completed = parse_completion({**answer, "output_ids": None}, REQUEST)
    assert len(completed.output_ids) == 0
    assert completed.logprobs is not None and len(completed.logprobs) == 0
    for other in (False, 0.0):
        with pytest.raises(CompletionError, match="output_ids is not a list of token ids"):
            parse_completion({**answer, "output_ids": other}, REQUEST)
    answer["meta_info"]["output_token_logprobs"] = [[-0.5, 5, None]]
    with pytest.raises(CompletionError, match="0 sampled ids came with 1 logprobs"):
        parse_completion(answer, REQUEST)


def test_an_abort_in_the_queue_has_no_counts() -> None:
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    meta = {"id": "r", "finish_reason": finish, "weight_version": "7"}
    answer = parse_completion({"text": "", "output_ids": [], "meta_info": meta}, REQUEST)
    assert (answer.finish_reason, len(answer.output_ids)) == ("abort", 0)
    assert answer.logprobs is not None and len(answer.logprobs) == 0
    assert (answer.prompt_tokens, answer.cached_tokens, answer.weight_versions) == (3, 0, ())


def test_logprobs_that_nobody_asked_for_are_not_read() -> None:
    asked = GenerateRequest(REQUEST.input_ids, {}, "s", return_logprob=False)
    answer = completion([7, 8], output_token_logprobs=None)
    assert parse_completion(answer, asked).logprobs is None


def test_weight_versions_are_spans_of_the_sampled_tokens() -> None:
    rest = {"version": "b", "start": 1, "end": 3}
    both = [*spans((0, 1))["weight_versions"], rest]
    answer = parse_completion(completion([7, 8, 9], weight_versions=both), REQUEST)
    assert answer.weight_versions == (WeightVersion("a", 0, 1), WeightVersion("b", 1, 3))
    assert answer.weight_version == "b"
    body = completion([7, 8, 9], weight_versions=None, weight_version="4")
    older = parse_completion(body, REQUEST)
    assert older.weight_versions == (WeightVersion("4", 0, 3),)
    assert parse_completion(completion([7], weight_versions=None), REQUEST).weight_versions == ()


# --- answers that no honest engine gives, with what was received ----------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_with_what_was_received(name: str) -> None:
    spoil, words = HOSTILE[name]
    with pytest.raises(CompletionError) as raised:
        parse_completion(spoil(honest()), ASKED, rid=RID, vocab_size=9096)
    assert [word for word in words if word not in str(raised.value)] == []


def test_the_honest_answer_is_none_of_them() -> None:
    found = parse_completion(honest(), ASKED, rid=RID, vocab_size=9096)
    assert (found.output_ids.tolist(), found.finish_reason, found.matched) == (IDS, "stop", 9)
    at_the_edge = completion([0, 1, 9095], id=RID, finish_reason={"type": "stop", "matched": "END"})
    assert parse_completion(at_the_edge, ASKED, rid=RID, vocab_size=9096).matched == "END"


# --- through the client ---------------------------------------------------------------------------


NO_ANSWERS = [b"", b"{", b'{"output_ids": [NaN]}', b"\xff\xfe", b"[]", b"7", b'"x"', b"[1, 2]"]


@pytest.mark.parametrize("body", [*NO_ANSWERS, b"<html></html>"])
async def test_what_is_no_answer_is_an_error_of_the_engine(body: bytes) -> None:
    seen, handle = flaky(web.Response(body=body))
    words = r"the engine's answer is not (JSON|a JSON object)"
    async with answering(handle) as calls:
        with pytest.raises(CompletionError, match=words):
            await calls.generate(request())
    assert len(seen) == 1


def of_length(index: int) -> dict[str, Any]:
    return completion([index], finish_reason={"type": "length", "length": 1})


async def test_no_answer_disables_the_vocabulary_check() -> None:
    """`INFO` name 5,000 ids, and a model may have 4,096 more. An unknown vocabulary still has a
    highest id.
    """
    wrong, outside = (2**31 - 1, 9096, -1), "outside the vocabulary of 5000"
    _, handle = flaky(*map(of_length, (*wrong, 3)))
    async with answering(handle) as calls:
        for index in wrong:
            words = rf"output_ids\[0\] is {index}, expected an id from 0 to 9095"
            with pytest.raises(CompletionError, match=words):
                await calls.generate(request())
            with pytest.raises(TokenError, match=outside):
                await calls.generate(request([5, index]))
        assert (await calls.generate(request())).output_ids.tolist() == [3]
        with pytest.raises(TokenError, match=outside):
            await calls.generate(request([5, 5000]))
    assert INFO.sampled_limit == 9096
    async with answering(flaky(of_length(wrong[0]))[1], model_info=ModelInfo()) as calls:
        with pytest.raises(CompletionError, match="2147483647"):
            await calls.generate(request())


async def test_another_requests_answer_is_asked_for_again() -> None:
    others = (completion([4], id=letter * 32) for letter in "fe")
    seen, generate = flaky(*others, completion([3]))
    aborted, abort = flaky({})
    routes, pauses = {"/generate": generate, "/abort_request": abort}, Pauses()
    async with client_of(routes, sleep=pauses) as calls:
        answer = await calls.generate(request())
    assert (answer.output_ids.tolist(), answer.attempts, len(pauses)) == ([3], 3, 2)
    assert [body["rid"] for body in aborted] == [body["rid"] for body in seen[:2]]


async def streamed(*events: dict[str, Any], rid: str = RID) -> tuple[list[list[int]], Any]:
    """What progress was told, and what came of the stream: its last event, or an error."""
    told: list[list[int]] = []

    async def chunks() -> Any:
        for event in events:
            yield b"data: " + orjson.dumps(event) + b"\n\n"

    def check(given: Any) -> None:
        if -1 in given:
            raise CompletionError(f"the ids {given}")

    reader = EventReader(lambda ids: told.append(list(ids)), rid, check)
    try:
        return told, await reader.read(chunks())  # pyright: ignore[reportArgumentType]
    except CompletionError as error:
        return told, error


def part(found: list[int], **fields: Any) -> dict[str, Any]:
    return completion(found, **{"id": RID, "finish_reason": None, **fields})


WAS = r"output_ids\[%d\] was %d, now it is"


@pytest.mark.parametrize(
    ("events", "told", "words"),
    [
        ([part([3, 4]), part([3])], [[3, 4]], rf"{WAS % (1, 4)} missing \(2 ids before, 1 now\)"),
        ([part([3, 4]), part([3, 5, 6])], [[3, 4]], f"{WAS % (1, 4)} 5"),
        ([part([3]), part([])], [[3]], f"{WAS % (0, 3)} missing"),
        ([part([3]), completion([4], id=RID)], [[3]], f"{WAS % (0, 3)} 4"),
        ([part([3]), completion([], id=RID)], [[3]], "changed ids that it had already sent"),
        ([part([3]), part([3, -1])], [[3]], r"the ids \[3, -1\]"),
    ],
)
async def test_ids_that_were_told_stay(events: Any, told: list[list[int]], words: str) -> None:
    received, error = await streamed(*events)
    assert received == told
    with pytest.raises(CompletionError, match=words):
        raise error


@pytest.mark.parametrize(
    "other", [part([4], id="f" * 16), completion([4], id="f" * 16), part([4], id=5)]
)
async def test_a_stream_with_another_request_id_reports_no_progress(other: dict[str, Any]) -> None:
    told, failure = await streamed(other)
    assert (told, failure.retry) == ([], True)
    assert "answer is for another request" in failure.message
    told, failure = await streamed(part([3]), other)
    assert told == [[3]]
    assert "answer is for another request" in failure.message


async def test_answers_with_another_request_id_are_an_error() -> None:
    _, handle = flaky(completion([4], id="f" * 32))
    words = f"another request: meta_info.id is '{'f' * 32}', expected .* after 3 attempts"
    async with answering(handle, retries=2) as calls:
        with pytest.raises(EngineError, match=words):
            await calls.generate(request())
