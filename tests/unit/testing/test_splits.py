"""Non-canonical token splits: other ids, the same text."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_tokenizer import CONTROL_TOKENS
from support.embedded import says, session, wired

from toolroll.testing import TokenSplitter

pytestmark = pytest.mark.tokens

SENTENCE = 'The account was updated. {"name": "get_flight", "arguments": {"order_id": 17}}'


@pytest.fixture(scope="module")
def splitter(any_tokenizer: Any) -> TokenSplitter:
    return TokenSplitter(any_tokenizer)


texts = st.lists(
    st.one_of(st.text(max_size=20), st.sampled_from([*CONTROL_TOKENS, SENTENCE])), max_size=6
).map("".join)


@given(text=texts, seed=st.integers(0, 999), rate=st.sampled_from([0.0, 0.3, 1.0]))
def test_a_split_decodes_to_the_same_text(
    any_tokenizer: Any, splitter: TokenSplitter, text: str, seed: int, rate: float
) -> None:
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    split = splitter.split(ids, random.Random(seed), rate=rate)
    decode = any_tokenizer.backend_tokenizer.decode
    assert decode(split, skip_special_tokens=False) == decode(ids, skip_special_tokens=False)
    added = set(any_tokenizer.get_added_vocab().values())
    control = lambda some: [index for index in some if index in added]
    assert control(split) == control(ids)
    if rate == 0.0:
        assert split == ids


def test_most_splits_are_not_canonical(any_tokenizer: Any, splitter: TokenSplitter) -> None:
    ids = any_tokenizer.encode(SENTENCE, add_special_tokens=False)
    found = [splitter.split(ids, random.Random(seed)) for seed in range(20)]
    assert sum(split != ids for split in found) >= 18
    assert len({tuple(split) for split in found}) >= 15
    assert any(len(split) > len(ids) for split in found)
    assert all(
        any_tokenizer.encode(any_tokenizer.decode(split), add_special_tokens=False) == ids
        for split in found
    )


def test_every_split_of_a_text_has_a_chance(tokenizer: Any) -> None:
    """Also those that merge what the tokenizer keeps apart, and those of three pieces."""
    splitter = TokenSplitter(tokenizer)
    ids = tokenizer.encode("the")
    vocabulary = tokenizer.get_vocab()
    cuts = [cut.split() for cut in ("the", "t he", "th e", "t h e")]
    known = [cut for cut in cuts if all(piece in vocabulary for piece in cut)]
    possible = {tuple(vocabulary[piece] for piece in cut) for cut in known}
    found = {tuple(splitter.split(ids, random.Random(seed), rate=1.0)) for seed in range(200)}
    assert len(possible) >= 3
    assert found == possible


def test_ids_that_are_half_a_character_stay_decodable(tokenizer: Any) -> None:
    """An answer that was cut inside a character: its bytes stay the same."""
    ids = tokenizer.encode("漢字")[:-1]
    splitter = TokenSplitter(tokenizer)
    splits = [splitter.split(ids, random.Random(seed), rate=1.0) for seed in range(20)]
    assert {tokenizer.decode(split) for split in splits} == {tokenizer.decode(ids)}


async def test_the_engine_samples_splits_and_says_the_same_text(tokenizer: Any) -> None:
    canonical = [*tokenizer.encode(SENTENCE), tokenizer.eos_token_id]
    seen = []
    async with wired(says(SENTENCE), split="random", seed=1) as (engine, wire):
        for _ in range(10):
            answer = await wire.generate([300], **session("s"))
            assert answer.body["text"] == SENTENCE
            seen.append(answer.output_ids)
        assert [entry.output_ids for entry in engine.log] == seen
    assert sum(ids != canonical for ids in seen) >= 8
    assert all(ids[-1] == tokenizer.eos_token_id for ids in seen)


async def test_the_engines_splits_are_seeded() -> None:
    """By the seed, the routing key and the call: not by the order in which episodes come."""

    async def play(seed: int, keys: list[str]) -> dict[str, list[int]]:
        async with wired(says(SENTENCE), split="random", seed=seed) as (_, wire):
            return {key: (await wire.generate([300], **session(key))).output_ids for key in keys}

    first = await play(1, ["a", "b", "c"])
    assert await play(1, ["c", "a", "b"]) == first
    assert await play(2, ["a", "b", "c"]) != first
    assert first["a"] != first["b"]
