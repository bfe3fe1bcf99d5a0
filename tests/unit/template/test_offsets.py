"""Offsets of ids in their text cost in proportion to the text."""

from __future__ import annotations

from typing import Any

from support.counted import CountedEncoder


def test_offsets_cost_little_although_characters_are_cut(tokenizer: Any) -> None:
    counts = []
    for length in (1000, 4000):
        encoder = CountedEncoder(tokenizer)
        ids = (encoder.encode("One two 🙂 three. ") * length)[:length]
        text = encoder.decode(ids)
        encoder.decoded = 0
        offsets = encoder.offsets(ids, text)
        assert len(offsets) == length and offsets[-1][1] == len(text.rstrip("\ufffd"))
        counts.append(encoder.decoded)
    assert counts[1] < 5 * counts[0]
