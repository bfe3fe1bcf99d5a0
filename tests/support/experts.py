"""The routed experts of the embedded engine, computed again from its log."""

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from toolroll.testing import LoggedRequest


def first_experts(
    log: Iterable[LoggedRequest], input_ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """The rows of the sequence `input_ids`: each from the first forward pass over its token, in a
    request that sampled anything. The requests in `log` came one after the other.
    """
    first: dict[bytes, int] = {}
    done = 0
    for entry in log:
        ids = np.concatenate([entry.input_ids, np.array(entry.output_ids[:-1], dtype=np.int32)])
        for length in range(1, len(ids) + 1 if entry.output_ids else 1):
            first.setdefault(
                ids[:length].tobytes(), done + 1 + max(0, length - len(entry.input_ids))
            )
        done += max(1, len(entry.output_ids))
    ids = np.asarray(input_ids, dtype=np.int32)
    passes = [first[ids[:length].tobytes()] for length in range(1, len(ids))]
    pairs = zip(ids[:-1].tolist(), passes, strict=True)
    rows = [[index % 8, number % 256, number // 256, index % 5] for index, number in pairs]
    return np.array(rows, dtype=np.int32)


def sent_experts(answer: Mapping[str, Any]) -> npt.NDArray[np.int32]:
    """The rows in the JSON of an answer, [tokens, 2, 2]."""
    encoded = answer["meta_info"]["routed_experts"]
    return np.frombuffer(base64.b64decode(encoded), dtype=np.int32).reshape(-1, 2, 2)
