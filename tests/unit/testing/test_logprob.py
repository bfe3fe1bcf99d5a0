"""The embedded engine's logprobs: a pure function of (prefix ids, id)."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.embedded import answer_of, says, wired

from toolroll.testing import reference_logprob, reference_logprobs

ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)
token = st.integers(0, 2**31 - 1)


@given(prefix=ids, said=ids)
def test_many_at_once_are_the_same_as_one_by_one(prefix: list[int], said: list[int]) -> None:
    one_by_one = [reference_logprob(prefix + said[:at], index) for at, index in enumerate(said)]
    assert reference_logprobs(prefix, said) == one_by_one
    assert reference_logprobs(np.array(prefix, dtype=np.int64), iter(said)) == one_by_one


@given(prefix=ids, index=token)
def test_a_value_is_a_logprob_and_exact_in_float32(prefix: list[int], index: int) -> None:
    value = reference_logprob(prefix, index)
    assert -8.01 < value < 0
    assert 0 < math.exp(value) < 1
    assert float(np.float32(value)) == value


@given(
    prefix=st.lists(token, min_size=1, max_size=12), index=token, at=st.integers(0, 11), other=token
)
def test_every_id_of_the_prefix_counts(prefix: list[int], index: int, at: int, other: int) -> None:
    changed = [*prefix]
    changed[at % len(prefix)] = other
    agrees = reference_logprob(changed, index) == reference_logprob(prefix, index)
    assert agrees == (changed == prefix)
    assert reference_logprob(prefix[1:], index) != reference_logprob(prefix, index)


@given(prefix=ids, index=token, other=token)
def test_the_id_counts(prefix: list[int], index: int, other: int) -> None:
    assert (reference_logprob(prefix, index) == reference_logprob(prefix, other)) == (
        index == other
    )


def test_a_value_stays_what_it_is() -> None:
    """Recorded episodes are judged by it: it may not change between versions or machines."""
    assert reference_logprobs([1, 2, 3], [4, 5]) == [-6.264920711517334, -1.7992198467254639]


async def test_top_logprobs_are_reference_logprobs() -> None:
    answer, _ = await answer_of(says([7, 9, 1]), [1, 2], fields={"top_logprobs_num": 3})
    tops = answer.meta["output_top_logprobs"]
    assert len(tops) == len(answer.body["output_ids"])
    for at, best in enumerate(tops):
        before = [1, 2, *answer.body["output_ids"][:at]]
        assert [value for value, _, _ in best] == sorted((one[0] for one in best), reverse=True)
        assert all(value == reference_logprob(before, index) for value, index, _ in best)
    assert [len(best) for best in tops[:2]] == [3, 3]


async def test_the_engine_is_its_own_worker() -> None:
    """As slime asks a router for its workers, to abort their requests."""
    async with (
        wired() as (engine, wire),
        wire.http.get(f"{engine.url}/workers") as response,
    ):
        listed = await response.json()
    assert [worker["url"] for worker in listed["workers"]] == [engine.url]
