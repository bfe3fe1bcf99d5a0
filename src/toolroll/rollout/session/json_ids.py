"""`JsonIds`: the ids of a growing prompt as JSON, with their number and the highest one, to check
requests.
"""

from __future__ import annotations

import numpy as np

from toolroll.rollout.runtime.jsonable import ids_json
from toolroll.rollout.types import IdArray


class JsonIds:
    """An empty list of ids. Each appended id is encoded once."""

    __slots__ = ("_json", "_length", "highest")

    def __init__(self) -> None:
        self._length = 0
        self._json = bytearray()
        self.highest = 0
        """The highest id as an unsigned number, so a negative id is the highest; 0 if empty."""

    def __len__(self) -> int:
        return self._length

    def append(self, ids: IdArray) -> None:
        """Append `ids`, int32 and one-dimensional."""
        if not len(ids):
            return
        ids = np.ascontiguousarray(ids, dtype=np.intc)
        highest = int(np.maximum.reduce(ids.view(np.uint32)))
        if self._json:
            self._json += b","
        self._json += ids_json(ids)
        self._length += len(ids)
        self.highest = max(self.highest, highest)

    @property
    def json(self) -> bytes:
        """Return the ids as JSON text without brackets."""
        return bytes(self._json)
