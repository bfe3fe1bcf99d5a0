"""Other token splits of the same text: what a model may sample and no tokenizer would give back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


def random_split(tokenizer: Any, ids: Sequence[int], rng: random.Random, *, rate: float = 0.3) -> list[int]:
    """`ids` with some tokens replaced by two that spell the same text; control tokens stay whole.

    Only splits that decode to exactly the same text are taken, so text and bytes never change.
    """
    added = set(tokenizer.get_added_vocab().values())
    out: list[int] = []
    for index in ids:
        pair = _pair(tokenizer, index, rng) if index not in added and rng.random() < rate else None
        out += pair or [index]
    decode = tokenizer.backend_tokenizer.decode
    same = decode(out, skip_special_tokens=False) == decode(list(ids), skip_special_tokens=False)
    return out if same else list(ids)


def _pair(tokenizer: Any, index: int, rng: random.Random) -> list[int] | None:
    piece = tokenizer.convert_ids_to_tokens(index)
    if piece is None or len(piece) < 2:
        return None
    cuts = list(range(1, len(piece)))
    rng.shuffle(cuts)
    backend = tokenizer.backend_tokenizer
    for cut in cuts:
        left, right = backend.token_to_id(piece[:cut]), backend.token_to_id(piece[cut:])
        if left is not None and right is not None:
            return [left, right]
    return None
