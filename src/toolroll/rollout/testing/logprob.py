"""The logprobs of an embedded engine without a language model. Each logprob is computed from a hash
of all ids up to and including its token, so tests can compute it too.

Invariant: a logprob depends only on the whole prefix and the token's id. So a test detects a
logprob that was recorded for the wrong token, and a recorded prompt that differs in a single id
from the prompt that the engine received.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

_SPREAD = 8.0


def reference_logprob(prefix_ids: Sequence[int] | npt.NDArray[Any], token_id: int) -> float:
    """Return the logprob (in nats) of `token_id` after `prefix_ids`: a float32 in (-8.01, 0)."""
    return reference_logprobs(prefix_ids, (token_id,))[0]


def reference_logprobs(
    prefix_ids: Sequence[int] | npt.NDArray[Any], ids: Iterable[int]
) -> list[float]:
    """Return the logprob of each of `ids`, given `prefix_ids` and the earlier `ids`. This takes
    O(prefix + ids), because the hash is incremental.
    """
    state = _state(prefix_ids)
    values = []
    for token_id in ids:
        state.update(_bytes(token_id))
        values.append(_value(state))
    return values


def top_logprobs(
    prefix_ids: Sequence[int] | npt.NDArray[Any], ids: Iterable[int], most: int
) -> list[list[tuple[float, int]]]:
    """Return the top logprobs at the position of each of `ids`: up to `most` pairs (logprob, id),
    the most likely first. The candidates are the id itself and the `most` next lower ids, each with
    its `reference_logprob`.
    """
    state = _state(prefix_ids)
    tops = []
    for token_id in ids:
        ranked = []
        for other in range(int(token_id), max(-1, int(token_id) - most - 1), -1):
            with_other = state.copy()
            with_other.update(_bytes(other))
            ranked.append((_value(with_other), other))
        tops.append(sorted(ranked, reverse=True)[:most])
        state.update(_bytes(token_id))
    return tops


def top_input_logprobs(
    prompt: npt.NDArray[np.int32], start: int, most: int
) -> list[list[tuple[float, int]]]:
    """Return the top logprobs at each prompt position after `start`: `most` pairs (logprob, id),
    the most likely first. The candidates are the prompt's own id and the next higher ids.
    """
    tops = []
    for position in range(start + 1, len(prompt)):
        ids = range(int(prompt[position]), int(prompt[position]) + most)
        ranked = [(reference_logprob(prompt[:position], index), index) for index in ids]
        tops.append(sorted(ranked, key=lambda pair: -pair[0]))
    return tops


def _state(prefix_ids: Sequence[int] | npt.NDArray[Any]) -> blake2b:
    return blake2b(np.asarray(prefix_ids, dtype="<i4").tobytes(), digest_size=8)


def _bytes(token_id: int) -> bytes:
    return int(token_id).to_bytes(4, "little", signed=True)


def _value(state: blake2b) -> float:
    share = int.from_bytes(state.copy().digest(), "big") / 2**64
    return float(np.float32(-_SPREAD * share - 2.0**-20))
