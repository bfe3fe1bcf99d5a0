"""`GrowableArray`: a one-dimensional array that grows.

Invariant: a value never changes after it is appended, so a view of the array does not need a copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROOM = 256


class GrowableArray:
    """An array of `dtype` that starts empty and grows by `append`."""

    __slots__ = ("_data", "_length")

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._data: npt.NDArray[Any] = np.empty(0, dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, values: npt.NDArray[Any]) -> None:
        """Append the one-dimensional array `values`."""
        start = self._length
        stop = start + len(values)
        if stop > len(self._data):
            grown = np.empty(stop + stop // 8 + _ROOM, dtype=self._data.dtype)
            grown[:start] = self._data[:start]
            self._data = grown
        self._data[start:stop] = values
        self._length = stop

    def view(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Return a read-only view of [start, stop), by default of all values."""
        view = self._data[start : self._length if stop is None else stop]
        view.flags.writeable = False
        return view
