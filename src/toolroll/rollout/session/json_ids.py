"""`JsonIds`: the ids of a growing prompt as JSON, and what a request is checked by: their number
and the highest one.
"""

from __future__ import annotations

import numpy as np

from toolroll.rollout.runtime.jsonable import ids_json
from toolroll.rollout.types import IdArray


class JsonIds:
    """Empty at first; what is appended is encoded once."""

    __slots__ = ("_json", "_length", "highest")

    def __init__(self) -> None:
        self._length = 0
        self._json = bytearray()
        self.highest = 0
        """The highest id, as an unsigned number: a negative one is above all others. 0 for none."""

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
        """JSON text without brackets."""
        return bytes(self._json)
