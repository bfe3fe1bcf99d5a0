"""Compare sequences."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences, such as texts or ids."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)
