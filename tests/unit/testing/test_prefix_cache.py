"""The radix tree behind `cached_tokens`, against the plain definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toolroll.testing.prefix_cache import PrefixCache

sequences = st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=12)


def array(ids: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, dtype=np.int32)


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(inserted=sequences, asked=sequences)
def test_a_match_is_the_longest_prefix(inserted: list[list[int]], asked: list[list[int]]) -> None:
    """With the passes of the first sequence that has each token."""
    cache = PrefixCache()

    def passes(ids: list[int], earlier: list[list[int]]) -> list[int]:
        longest = max((common(ids, other) for other in earlier), default=0)
        return [
            next(n for n, other in enumerate(earlier) if common(ids, other) > position)
            for position in range(longest)
        ]

    for at, ids in enumerate(inserted):
        assert cache.match(array(ids)).tolist() == passes(ids, inserted[:at])
        cache.insert(array(ids), array([at] * len(ids)))
    for ids in asked:
        assert cache.match(array(ids)).tolist() == passes(ids, inserted)
