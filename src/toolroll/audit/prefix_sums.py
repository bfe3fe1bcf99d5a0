"""`prefix_sums`: a hash of each prefix of a list of token ids, all at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_TOKEN, _PLACE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def prefix_sums(ids: npt.NDArray[np.integer]) -> list[int]:
    """Return n + 1 numbers of 64 bits: a hash of each prefix of `ids`, from the empty one to all.

    Each pair of an id and its position adds a number that looks random (the finalizer of
    splitmix64), so two different prefixes have the same hash by accident only.
    """
    mixed = ids.astype(np.uint64) * _TOKEN + np.arange(1, len(ids) + 1, dtype=np.uint64) * _PLACE
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    sums = np.cumsum(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)
    return [0, *sums.tolist()]
