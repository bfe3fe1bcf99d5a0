"""`parse_completion`: an answer is kept as it is, and refused if it contradicts itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http import completion

from toolroll.rollout.engine import parse_completion
from toolroll.rollout.errors import CompletionError
from toolroll.rollout.media import Image
from toolroll.rollout.types import GenerateRequest, WeightVersion

pytestmark = pytest.mark.tokens

ASKED = GenerateRequest(np.array([1, 2, 3], dtype=np.int32), {}, "s")
LOGPROB = st.floats(-50, 0, width=32)
SAMPLED_ID = st.tuples(st.integers(0, 2**31 - 2), LOGPROB)
SAMPLED = st.lists(SAMPLED_ID, min_size=1, max_size=50)


def body(sampled: list[tuple[int, float]], **meta: Any) -> dict[str, Any]:
    ids = [index for index, _ in sampled]
    items = [[value, index, None] for index, value in sampled]
    made = completion(ids, output_token_logprobs=items, prompt_tokens=3, **meta)
    return dict(orjson.loads(orjson.dumps(made)))


@given(sampled=SAMPLED)
def test_ids_and_logprobs_come_through_bit_for_bit(sampled: list[tuple[int, float]]) -> None:
    found = parse_completion(body(sampled), ASKED)
    assert found.output_ids.dtype == np.int32 and found.output_ids.tolist() == [
        index for index, _ in sampled
    ]
    assert found.logprobs is not None and found.logprobs.dtype == np.float32
    assert found.logprobs.tolist() == [value for _, value in sampled]


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
    asked = GenerateRequest(ASKED.input_ids, {}, "s", images=(Image(1, 1, "ab"),))
    found = parse_completion(answer, asked).other_prompt
    assert found is difference is None or (difference or "") in (found or "")
    with pytest.raises(CompletionError, match="a prompt of 9 tokens"):
        parse_completion(answer, ASKED)


SPOILED: dict[str, Callable[[list[Any], int], Any]] = {
    "drop": lambda items, place: items.pop(place),
    "double": lambda items, place: items.insert(place, items[place]),
    "neighbors": lambda items, place: items.append(items.pop(0)),
    "another id": lambda items, place: items[place].__setitem__(1, items[place][1] ^ 1),
    "null": lambda items, place: items[place].__setitem__(0, None),
    "short": lambda items, place: items[place].__delitem__(slice(1, None)),
    **{
        str(value): lambda items, place, value=value: items[place].__setitem__(0, value)  # type: ignore[misc]
        for value in (math.nan, math.inf, 0.0011, 1, True)
    },
}


@pytest.mark.parametrize("how", SPOILED)
@given(
    sampled=st.lists(SAMPLED_ID, min_size=2, max_size=50, unique_by=lambda pair: pair[0]),
    place=st.integers(0, 49),
    short=st.booleans(),
)
def test_a_spoiled_logprob_is_refused(
    how: str, sampled: list[tuple[int, float]], place: int, *, short: bool
) -> None:
    """Wherever it is, and whether or not each item has a text."""
    answer = body(sampled)
    items = [item[:2] if short else item for item in answer["meta_info"]["output_token_logprobs"]]
    answer["meta_info"]["output_token_logprobs"] = items
    SPOILED[how](items, place % len(items))
    with pytest.raises(CompletionError):
        parse_completion(answer, ASKED)


ITEMS: dict[str, Callable[[float, int], Any]] = {
    "of two": lambda value, index: [value, index],
    "of three": lambda value, index: [value, index, None],
    "with its text": lambda value, index: [value, index, "text"],
    "of four": lambda value, index: [value, index, None, 7],
    "of five, an id where the next logprob would be": lambda *pair: [*pair, None, *pair],
}


@given(
    sampled=SAMPLED,
    kinds=st.lists(st.sampled_from(sorted(ITEMS)), min_size=50, max_size=50),
    mixed=st.booleans(),
)
def test_items_of_other_lengths_are_read_in_the_same_way(
    sampled: list[tuple[int, float]], kinds: list[str], *, mixed: bool
) -> None:
    answer = body(sampled)
    chosen = kinds[: len(sampled)] if mixed else kinds[:1] * len(sampled)
    items = [
        ITEMS[kind](value, index) for kind, (index, value) in zip(chosen, sampled, strict=True)
    ]
    answer["meta_info"]["output_token_logprobs"] = items
    logprobs = parse_completion(answer, ASKED).logprobs
    assert logprobs is not None and logprobs.tolist() == [value for _, value in sampled]
    items[0][1] ^= 1
    words = f"logprob 0 belongs to token {items[0][1]}, output_ids has {sampled[0][0]} there"
    with pytest.raises(CompletionError, match=words):
        parse_completion(answer, ASKED)


NO_ITEMS: list[Any] = [None, 8, "abc", [], [-0.5], {}, {"a": 1, "b": 2, "c": 3}, [None, 8, None]]


@pytest.mark.parametrize(
    "item", [*NO_ITEMS, ["-0.5", 8, None], [[-0.5], 8, None], [-(10**400), 8]], ids=repr
)
def test_what_is_no_item_is_refused_in_words(item: Any) -> None:
    words = r"is not \[logprob, id, text\] with a number first"
    others = [([-0.25, 7, None], [-0.5, 9, None]), ([-0.25, 7], [-0.5, 9, None, 0])]
    for before, after in others:
        items = [before, item, after]
        with pytest.raises(CompletionError, match=words):
            parse_completion(completion([7, 8, 9], output_token_logprobs=items), ASKED)


def spans(*ends: tuple[Any, Any]) -> dict[str, Any]:
    return {
        "weight_versions": [{"version": "a", "start": start, "end": end} for start, end in ends]
    }


def second(value: Any) -> dict[str, Any]:
    """The second logprob belongs to `value`."""
    return {"output_token_logprobs": [[-0.25, 7, None], [-0.5, value, None]]}


NO_SPAN = "a weight version is not a span with version, start and end"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"output_token_logprobs": 5}, "cannot be read"),
    ({"output_top_logprobs": [5, 5]}, "cannot be read"),
    *((second(other), "logprob 1 belongs to token") for other in ("8", 8.5, [8])),
    ({"weight_versions": 7}, "cannot be read"),
    ({"weight_versions": ["v"]}, NO_SPAN),
    (spans((math.inf, 2)), NO_SPAN),
    (spans((0, 1)), "cover 1 of 2"),
    (spans((0, 2), (0, 2)), "gap or overlap at token 2"),
]


@pytest.mark.parametrize(("meta", "words"), REFUSED, ids=repr)
def test_a_contradiction_is_refused_in_words(meta: dict[str, Any], words: str) -> None:
    with pytest.raises(CompletionError, match=words):
        parse_completion(completion([7, 8], **meta), ASKED)


def test_the_arrays_of_a_completion_are_writable() -> None:
    """As tensors are made of it without a copy."""
    answer = parse_completion(completion([7, 8]), ASKED)
    assert answer.logprobs is not None
    assert answer.output_ids.flags.writeable and answer.logprobs.flags.writeable


def test_no_ids_are_an_empty_list() -> None:
    answer = completion([], prompt_tokens=3, output_token_logprobs=None, weight_versions=None)
    completed = parse_completion({**answer, "output_ids": None}, ASKED)
    assert len(completed.output_ids) == 0
    assert completed.logprobs is not None and len(completed.logprobs) == 0
    for other in (False, 0.0):
        with pytest.raises(CompletionError, match="output_ids is not a list of token ids"):
            parse_completion({**answer, "output_ids": other}, ASKED)
    answer["meta_info"]["output_token_logprobs"] = [[-0.5, 5, None]]
    with pytest.raises(CompletionError, match="0 sampled ids came with 1 logprobs"):
        parse_completion(answer, ASKED)


def test_logprobs_that_nobody_asked_for_are_not_read() -> None:
    asked = GenerateRequest(ASKED.input_ids, {}, "s", return_logprob=False)
    answer = completion([7, 8], output_token_logprobs=None)
    assert parse_completion(answer, asked).logprobs is None


@pytest.mark.parametrize(
    ("finish", "reason", "matched"),
    [
        ({"type": "stop", "matched": 8}, "stop", 8),
        ({"type": "stop", "matched": "lo"}, "stop", "lo"),
        ({"type": "length", "length": 2}, "length", None),
        ({"type": "abort", "message": "Aborted", "status_code": None}, "abort", None),
    ],
)
def test_the_finish_reasons_of_sglang(finish: dict[str, Any], reason: str, matched: Any) -> None:
    asked = GenerateRequest(ASKED.input_ids, {"stop": ["la", "lo"]}, "s")
    found = parse_completion(completion([7, 8], finish_reason=finish), asked)
    assert (found.finish_reason, found.matched) == (reason, matched)


def test_an_abort_in_the_queue_has_no_counts() -> None:
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    meta = {"id": "r", "finish_reason": finish, "weight_version": "7"}
    found = parse_completion({"text": "", "output_ids": [], "meta_info": meta}, ASKED)
    assert (found.finish_reason, len(found.output_ids), found.weight_versions) == ("abort", 0, ())
    assert found.logprobs is not None and len(found.logprobs) == 0
    assert (found.prompt_tokens, found.cached_tokens) == (3, 0)


def test_weight_versions_are_spans_of_the_sampled_tokens() -> None:
    rest = {"version": "b", "start": 1, "end": 3}
    both = [*spans((0, 1))["weight_versions"], rest]
    answer = parse_completion(completion([7, 8, 9], weight_versions=both), ASKED)
    assert answer.weight_versions == (WeightVersion("a", 0, 1), WeightVersion("b", 1, 3))
    assert answer.weight_version == "b"
    older = parse_completion(completion([7, 8, 9], weight_versions=None, weight_version="4"), ASKED)
    assert older.weight_versions == (WeightVersion("4", 0, 3),)
    assert parse_completion(completion([7], weight_versions=None), ASKED).weight_versions == ()


def test_a_logprob_a_hair_above_zero_is_rounding() -> None:
    """The log-softmax of bf16 logits may end there."""
    found = parse_completion(body([(7, 5e-4)]), ASKED)
    assert found.logprobs is not None and found.logprobs[0] == np.float32(5e-4)
