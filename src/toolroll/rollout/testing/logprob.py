"""The logprobs of the embedded engine: a hash of (the ids before, the id), which tests can
recompute.

Invariant: a value depends only on the whole prefix and the id. So a test detects a logprob that was
recorded for the wrong token, or a prompt that differs from the served one in a single id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

_SPREAD = 8.0


def reference_logprob(prefix_ids: Sequence[int] | npt.NDArray[Any], token_id: int) -> float:
    """Return the logprob of `token_id` after `prefix_ids`, in nats: in (-8.01, 0), a float32."""
    return reference_logprobs(prefix_ids, (token_id,))[0]


def reference_logprobs(
    prefix_ids: Sequence[int] | npt.NDArray[Any], ids: Iterable[int]
) -> list[float]:
    """Return the logprobs of `ids` after `prefix_ids`. O(prefix + ids), because the hash is
    incremental.
    """
    state = blake2b(np.asarray(prefix_ids, dtype="<i4").tobytes(), digest_size=8)
    values = []
    for token_id in ids:
        state.update(int(token_id).to_bytes(4, "little", signed=True))
        share = int.from_bytes(state.copy().digest(), "big") / 2**64
        values.append(float(np.float32(-_SPREAD * share - 2.0**-20)))
    return values
