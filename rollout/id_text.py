"""`IdText`: the ids of a growing prompt as JSON, and what a request is checked by: their number and the highest one.

Invariant: what was given out is never written again, whoever holds it and however long.
"""

from __future__ import annotations

import numpy as np
import orjson

from toolroll.rollout.types import IdArray


class IdText:
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
        """Append `ids`, int32."""
        if not len(ids):
            return
        ids = np.ascontiguousarray(ids, dtype=np.intc)
        self._length += len(ids)
        self.highest = max(self.highest, int(np.maximum.reduce(ids.view(np.uint32))))
        new = orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        try:
            self._extend(new)
        except BufferError:  # a request still holds the view of it: that one keeps the memory, and this one goes on in another
            self._json = bytearray(self._json)
            self._extend(new)

    def _extend(self, new: bytes) -> None:
        self._json += b"," + new if self._json else new

    @property
    def json(self) -> memoryview:
        """JSON text without brackets: a view, whose holder should let it go before more is appended, which copies all of it else."""
        return memoryview(self._json).toreadonly()
