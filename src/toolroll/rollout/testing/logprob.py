"""The embedded engine's logprobs: a hash of (the ids before, the id), so that a test can recompute
each of them.

Invariant: a value depends on nothing but the whole prefix and the id, so a logprob recorded beside
the wrong token, or a prompt that differs in one id from the one that was served, does not agree
with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

_SPREAD = 8.0


def reference_logprob(prefix_ids: Sequence[int] | npt.NDArray[Any], token_id: int) -> float:
    """The logprob of `token_id` behind `prefix_ids`: in (-8.01, 0), in nats, exact in float32."""
    return reference_logprobs(prefix_ids, (token_id,))[0]


def reference_logprobs(
    prefix_ids: Sequence[int] | npt.NDArray[Any], ids: Iterable[int]
) -> list[float]:
    """The logprobs of `ids`, one behind the other, after `prefix_ids`; O(prefix + ids), as the
    hash goes on where it was.
    """
    state = blake2b(np.asarray(prefix_ids, dtype="<i4").tobytes(), digest_size=8)
    values = []
    for token_id in ids:
        state.update(int(token_id).to_bytes(4, "little", signed=True))
        share = int.from_bytes(state.copy().digest(), "big") / 2**64
        values.append(float(np.float32(-_SPREAD * share - 2.0**-20)))
    return values
