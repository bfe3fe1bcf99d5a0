"""`JsonIds`: the ids of a growing prompt as JSON text.

It also keeps the number of ids and the highest id. The engine client checks both before it sends a
request.
"""

from __future__ import annotations

import numpy as np

from toolroll.rollout.runtime.jsonable import ids_json
from toolroll.rollout.types import IdArray


class JsonIds:
    """A list of ids that starts empty and grows by `append`. Each id is encoded to JSON once."""

    __slots__ = ("_json", "_length", "highest")

    def __init__(self) -> None:
        self._length = 0
        self._json = bytearray()
        self.highest = 0
        """The highest id, read as an unsigned 32-bit number, or 0 if there are no ids. As an
        unsigned number, a negative id is higher than every valid id. So one comparison finds both
        negative ids and ids that are too high.
        """

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
