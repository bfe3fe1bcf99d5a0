"""`TokenBuffer`: the ids of a growing prompt, as an array and as the JSON of it.

Invariant: what was given out is never written again: `ids` is a view of memory that only grows behind it, and no copy.
"""

from __future__ import annotations

import numpy as np
import orjson

from toolroll.rollout.types import IdArray

_ROOM = 256


class TokenBuffer:
    """Empty at first."""

    def __init__(self) -> None:
        self._data: IdArray = np.empty(0, dtype=np.intc)
        self._length = 0
        self._highest = 0
        self._json = bytearray()

    def __len__(self) -> int:
        return self._length

    def append(self, ids: IdArray) -> None:
        """Append `ids`, int32."""
        if not len(ids):
            return
        stop = self._length + len(ids)
        if stop > len(self._data):
            grown = np.empty(stop + stop // 8 + _ROOM, dtype=np.intc)
            grown[: self._length] = self._data[: self._length]
            self._data = grown
        new = self._data[self._length : stop]
        new[:] = ids
        self._highest = max(self._highest, int(np.maximum.reduce(new.view(np.uint32))))
        self._length = stop
        if self._json:
            self._json += b","
        self._json += orjson.dumps(np.ascontiguousarray(ids, dtype=np.intc), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]

    @property
    def ids(self) -> IdArray:
        """All of them: a view that refuses to be written."""
        view = self._data[: self._length]
        view.flags.writeable = False
        return view

    @property
    def highest(self) -> int:
        """The highest id, as an unsigned number: a negative one is above all others. 0 for none."""
        return self._highest

    @property
    def json(self) -> bytes:
        """The same as JSON text without brackets."""
        return bytes(self._json)
