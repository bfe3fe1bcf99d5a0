"""Offsets of ids in their text cost in proportion to the text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolroll.rollout.template.encode import Encoder


class Counted(Encoder):
    """Counts the ids that are decoded."""

    decoded = 0

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        self.decoded += len(ids)
        return super().decode(ids)


def test_offsets_cost_little_although_characters_are_cut(tokenizer: Any) -> None:
    counts = []
    for length in (1000, 4000):
        encoder = Counted(tokenizer)
        ids = (encoder.encode("One two 🙂 three. ") * length)[:length]
        text = encoder.decode(ids)
        encoder.decoded = 0
        offsets = encoder.offsets(ids, text)
        assert len(offsets) == length and offsets[-1][1] == len(text.rstrip("\ufffd"))
        counts.append(encoder.decoded)
    assert counts[1] < 5 * counts[0]
