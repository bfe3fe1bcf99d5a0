"""`PrefixStore`: the keys and values of ended sequences, for requests that continue them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toolroll.rollout.testing.language_model.kv_cache import KVCache
from toolroll.rollout.testing.prefix_cache import common_length

_Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """The `ids` of a prefix, and a `cache` with their keys and values."""

    group: str
    ids: _Ids
    cache: KVCache


class PrefixStore:
    """Stores prefixes whose caches have at most `limit` positions in all. Beyond this limit, the
    least recently used prefixes are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._prefixes: list[StoredPrefix] = []  # the last used is the last

    def add(self, prefix: StoredPrefix) -> None:
        """Store `prefix`. Drop the stored prefixes of the same group with which it starts."""
        self._prefixes = [
            each
            for each in self._prefixes
            if each.group != prefix.group or common_length(each.ids, prefix.ids) < len(each.ids)
        ]
        self._prefixes.append(prefix)
        while sum(each.cache.positions for each in self._prefixes) > self._limit:
            del self._prefixes[0]

    def best(self, group: str, ids: _Ids) -> tuple[StoredPrefix | None, int]:
        """Return the prefix of the group that shares the most leading ids with `ids`, and the
        number of these ids.
        """
        found, most = None, 0
        for prefix in self._prefixes:
            if prefix.group == group and (common := common_length(prefix.ids, ids)) > most:
                found, most = prefix, common
        return found, most

    def take(self, prefix: StoredPrefix, tokens: int) -> KVCache | None:
        """Use the first `tokens` tokens of a prefix.

        If these are all its tokens, drop the prefix and return its cache, which the caller may
        change. Otherwise keep the prefix and return None: the caller must copy from its cache.
        """
        self._prefixes.remove(prefix)
        if tokens == len(prefix.ids):
            return prefix.cache
        self._prefixes.append(prefix)
        return None

    def clear(self) -> None:
        """Drop all prefixes."""
        self._prefixes.clear()
