"""The embedded engine's tokens: logprobs of prefix and id alone, the cache, and the tokenizer."""

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from make_tokenizer import CONTROL_TOKENS, VOCABULARY, build, corpus
from support.embedded import answer_of, says
from transformers import AutoTokenizer

from toolroll.testing import embedded_tokenizer_path, reference_logprob, reference_logprobs
from toolroll.testing.prefix_cache import PrefixCache

ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)
token = st.integers(0, 2**31 - 1)


@given(prefix=ids, said=ids)
def test_many_at_once_are_the_same_as_one_by_one(prefix: list[int], said: list[int]) -> None:
    one_by_one = [reference_logprob(prefix + said[:at], index) for at, index in enumerate(said)]
    assert reference_logprobs(prefix, said) == one_by_one
    assert reference_logprobs(np.array(prefix, dtype=np.int64), iter(said)) == one_by_one


@given(
    prefix=st.lists(token, min_size=1, max_size=12), index=token, at=st.integers(0, 11), other=token
)
def test_every_id_counts(prefix: list[int], index: int, at: int, other: int) -> None:
    """Each of the prefix, and the token's own. A value is a logprob, and exact in float32."""
    value = reference_logprob(prefix, index)
    assert -8.01 < value < 0
    assert 0 < math.exp(value) < 1
    assert float(np.float32(value)) == value
    changed = [*prefix]
    changed[at % len(prefix)] = other
    assert (reference_logprob(changed, index) == value) == (changed == prefix)
    assert reference_logprob(prefix[1:], index) != value
    assert (reference_logprob(prefix, other) == value) == (index == other)


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


# --- the radix tree behind cached_tokens ----------------------------------------------------------


sequences = st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=12)


def array(ids: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, dtype=np.int32)


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(inserted=sequences, asked=sequences)
def test_a_match_is_the_longest_prefix(inserted: list[list[int]], asked: list[list[int]]) -> None:
    """With the passes of the first sequence that has each token."""
    cache = PrefixCache()

    def passes(ids: list[int], earlier: list[list[int]]) -> list[int]:
        longest = max((common(ids, other) for other in earlier), default=0)
        return [
            next(n for n, other in enumerate(earlier) if common(ids, other) > position)
            for position in range(longest)
        ]

    for at, ids in enumerate(inserted):
        assert cache.match(array(ids)).tolist() == passes(ids, inserted[:at])
        cache.insert(array(ids), array([at] * len(ids)))
    for ids in asked:
        assert cache.match(array(ids)).tolist() == passes(ids, inserted)


# --- the tokenizer: made again byte for byte ------------------------------------------------------


def test_the_tokenizer_is_made_again_byte_for_byte() -> None:
    """Its corpus depends on the seed alone."""
    made = build().to_str(pretty=False) + "\n"
    assert made == (embedded_tokenizer_path() / "tokenizer.json").read_text(encoding="utf-8")
    assert list(corpus(lines=50)) == list(corpus(lines=50)) != list(corpus(seed=8, lines=50))


def test_a_folder_of_it_is_what_transformers_takes(tokenizer: Any) -> None:
    """Each control token is one token, and only three are hidden."""
    loaded = AutoTokenizer.from_pretrained(embedded_tokenizer_path())
    text = "<|turn|>user\nWhere is it? 漢 <tool_call><|end|>"
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.encode(text) == tokenizer.encode(text)
    assert (loaded.eos_token, loaded.pad_token, len(loaded)) == ("<|end|>", "<|pad|>", VOCABULARY)
    assert loaded.chat_template == tokenizer.chat_template
    ids = [tokenizer.encode(token) for token in CONTROL_TOKENS]
    assert [len(each) for each in ids] == [1] * len(CONTROL_TOKENS)
    shown = [tokenizer.decode(each, skip_special_tokens=True) for each in ids]
    assert shown == ["", "", "", *CONTROL_TOKENS[3:]]
