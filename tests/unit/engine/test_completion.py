"""`parse_completion`: what the engine said is kept as it is, and what contradicts itself is
refused.
"""

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
SAMPLED = st.lists(st.tuples(st.integers(0, 2**31 - 2), LOGPROB), min_size=1, max_size=50)


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
    "drop": lambda items, at: items.pop(at),
    "double": lambda items, at: items.insert(at, items[at]),
    "another id": lambda items, at: items[at].__setitem__(1, items[at][1] ^ 1),
    "nan": lambda items, at: items[at].__setitem__(0, math.nan),
    "positive": lambda items, at: items[at].__setitem__(0, 0.01),
    "null": lambda items, at: items[at].__setitem__(0, None),
    "short": lambda items, at: items[at].__delitem__(slice(1, None)),
}


@given(sampled=SAMPLED, at=st.integers(0, 49), how=st.sampled_from(sorted(SPOILED)))
def test_a_spoiled_logprob_is_refused(sampled: list[tuple[int, float]], at: int, how: str) -> None:
    answer = body(sampled)
    items = answer["meta_info"]["output_token_logprobs"]
    SPOILED[how](items, at % len(items))
    with pytest.raises(CompletionError):
        parse_completion(answer, ASKED)


ITEMS: dict[str, Callable[[float, int], Any]] = {
    "of two": lambda value, index: [value, index],
    "of three": lambda value, index: [value, index, None],
    "with its text": lambda value, index: [value, index, "text"],
    "of four": lambda value, index: [value, index, None, 7],
    "of five, an id where the next logprob would stand": lambda value, index: [
        value,
        index,
        None,
        value,
        index,
    ],
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
    made = [
        ITEMS[kinds[at if mixed else 0]](value, index) for at, (index, value) in enumerate(sampled)
    ]
    answer["meta_info"]["output_token_logprobs"] = made
    found = parse_completion(answer, ASKED)
    assert found.logprobs is not None and found.logprobs.tolist() == [value for _, value in sampled]
    made[0][1] ^= 1
    with pytest.raises(
        CompletionError,
        match=f"logprob 0 belongs to token {made[0][1]}, output_ids has {sampled[0][0]} there",
    ):
        parse_completion(answer, ASKED)


@pytest.mark.parametrize(
    "item",
    [
        None,
        8,
        "abc",
        [],
        [-0.5],
        {},
        {"a": 1, "b": 2, "c": 3},
        [None, 8, None],
        ["-0.5", 8, None],
        [[-0.5], 8, None],
        [-(10**400), 8],
    ],
    ids=repr,
)
def test_what_is_no_item_is_refused_in_words(item: Any) -> None:
    for items in (
        [[-0.25, 7, None], item, [-0.5, 9, None]],
        [[-0.25, 7], item, [-0.5, 9, None, 0]],
    ):
        with pytest.raises(
            CompletionError, match=r"is not \[logprob, id, text\] with a number first"
        ):
            parse_completion(completion([7, 8, 9], output_token_logprobs=items), ASKED)


@pytest.mark.parametrize("other", [None, "8", 8.5, [8]])
def test_an_item_with_no_id_belongs_to_another_token(other: Any) -> None:
    items = [[-0.25, 7, None], [-0.5, other, None], [math.nan, 9, None]]
    with pytest.raises(CompletionError, match="logprob 1 belongs to token"):
        parse_completion(completion([7, 8, 9], output_token_logprobs=items), ASKED)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0011, 1, True])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("more", [[None], []])
def test_a_logprob_that_is_no_logprob_is_refused_wherever_it_stands(
    value: float, at: int, more: list[Any]
) -> None:
    items = [[-0.25, 7, *more], [-math.inf, 8, *more], [-0.5, 9, *more]]
    items[at][0] = value
    with pytest.raises(CompletionError, match="NaN or above zero"):
        parse_completion(completion([7, 8, 9], output_token_logprobs=items), ASKED)


@pytest.mark.parametrize(
    "given",
    [
        5,
        "78",
        [7, "8"],
        [7, 8.0],
        [7, None],
        [7, [8]],
        [7, 2**31],
        [7, -(2**31) - 1],
        {"a": 7, "b": 8},
    ],
    ids=repr,
)
def test_what_is_no_list_of_ids_is_refused_in_words(given: Any) -> None:
    answer = completion([7, 8])
    answer["output_ids"] = given
    with pytest.raises(CompletionError, match="output_ids is not a list of token ids"):
        parse_completion(answer, ASKED)


def test_the_arrays_of_a_completion_are_writable() -> None:
    """As tensors are made of it without a copy."""
    found = parse_completion(completion([7, 8]), ASKED)
    assert (
        found.logprobs is not None
        and found.output_ids.flags.writeable
        and found.logprobs.flags.writeable
    )


@given(
    sampled=st.lists(
        st.tuples(st.integers(0, 9), LOGPROB),
        min_size=2,
        max_size=9,
        unique_by=lambda pair: pair[0],
    )
)
def test_logprobs_beside_their_neighbours_ids_are_refused(sampled: list[tuple[int, float]]) -> None:
    answer = body(sampled)
    items = answer["meta_info"]["output_token_logprobs"]
    items.append(items.pop(0))
    with pytest.raises(CompletionError, match="logprob 0 belongs to token"):
        parse_completion(answer, ASKED)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"completion_tokens": 3}, "counts 3 sampled tokens and sent 2"),
        ({"prompt_tokens": 4}, "read a prompt of 4 tokens, but 3 were sent"),
        ({"finish_reason": None}, "no finish_reason"),
        ({"finish_reason": "stop"}, "no finish_reason"),
        ({"output_token_logprobs": None}, "2 sampled ids came with 0 logprobs"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 1}]}, "cover 1 of 2"),
        (
            {"weight_versions": [{"version": "a", "start": 1, "end": 2}]},
            "gap or overlap at token 0",
        ),
        (
            {"weight_versions": [{"version": v, "start": 0, "end": 2} for v in "ab"]},
            "gap or overlap at token 2",
        ),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 3}]}, "cover 3 of 2"),
    ],
)
def test_a_contradiction_is_refused_in_words(meta: dict[str, Any], words: str) -> None:
    answer = completion([7, 8], **meta)
    with pytest.raises(CompletionError, match=words):
        parse_completion(answer, ASKED)


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "v", "start": 0}],
        ["v"],
        [{"version": "v", "start": 0, "end": "x"}],
        [{"version": "v", "start": math.inf, "end": 2}],
    ],
)
def test_a_weight_version_that_is_no_span_is_refused_in_words(spans: Any) -> None:
    with pytest.raises(
        CompletionError, match="a weight version is not a span with version, start and end"
    ):
        parse_completion(body([(5, -0.5), (6, -0.5)], weight_versions=spans), ASKED)


@pytest.mark.parametrize(
    ("top", "meta"),
    [
        ({}, {"output_token_logprobs": 5}),
        ({}, {"weight_versions": 7}),
        ({}, {"output_top_logprobs": [5]}),
        ({"output_ids": False}, {}),
        ({"output_ids": 0.0}, {}),
    ],
)
def test_whatever_cannot_be_read_is_refused(top: dict[str, Any], meta: dict[str, Any]) -> None:
    answer = {**body([(5, -0.5)]), **top}
    answer["meta_info"] |= meta
    with pytest.raises(CompletionError, match=r"cannot be read|not a list of token ids"):
        parse_completion(answer, ASKED)


@pytest.mark.parametrize("meta", [None, [], "x"])
def test_an_answer_without_facts_is_refused(meta: Any) -> None:
    with pytest.raises(CompletionError, match="no output_ids or no meta_info"):
        parse_completion({**body([(5, -0.5)]), "meta_info": meta}, ASKED)


def test_no_ids_are_an_empty_list() -> None:
    answer = {**body([(5, -0.5)]), "output_ids": None}
    answer["meta_info"] |= {
        "output_token_logprobs": None,
        "completion_tokens": 0,
        "weight_versions": None,
    }
    answer["meta_info"]["finish_reason"] = {"type": "length", "length": 0}
    found = parse_completion(answer, ASKED)
    assert len(found.output_ids) == 0 and found.logprobs is not None and len(found.logprobs) == 0
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
        (
            {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
            "abort",
            None,
        ),
    ],
)
def test_the_finish_reasons_of_sglang(finish: dict[str, Any], reason: str, matched: Any) -> None:
    asked = GenerateRequest(ASKED.input_ids, {"stop": ["la", "lo"]}, "s")
    found = parse_completion(completion([7, 8], finish_reason=finish), asked)
    assert (found.finish_reason, found.matched) == (reason, matched)


def test_an_abort_in_the_queue_has_no_counts() -> None:
    meta = {
        "id": "r",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "7",
    }
    found = parse_completion({"text": "", "output_ids": [], "meta_info": meta}, ASKED)
    assert (found.finish_reason, len(found.output_ids), found.weight_versions) == ("abort", 0, ())
    assert found.logprobs is not None and len(found.logprobs) == 0
    assert (found.prompt_tokens, found.cached_tokens) == (3, 0)


def test_weight_versions_are_spans_of_the_sampled_tokens() -> None:
    spans = [
        {"version": "step9", "start": 0, "end": 1},
        {"version": "step20", "start": 1, "end": 3},
    ]
    found = parse_completion(completion([7, 8, 9], weight_versions=spans), ASKED)
    assert found.weight_versions == (WeightVersion("step9", 0, 1), WeightVersion("step20", 1, 3))
    assert found.weight_version == "step20"
    older = parse_completion(completion([7, 8, 9], weight_versions=None, weight_version="4"), ASKED)
    assert older.weight_versions == (WeightVersion("4", 0, 3),)
    assert parse_completion(completion([7], weight_versions=None), ASKED).weight_versions == ()


def test_a_logprob_a_hair_above_zero_is_rounding() -> None:
    """The log-softmax of bf16 logits may end there."""
    found = parse_completion(body([(7, 5e-4)]), ASKED)
    assert found.logprobs is not None and found.logprobs[0] == np.float32(5e-4)
