"""Routed experts of a mixture-of-experts model: which experts processed which token.

Row i is of the forward pass with token i as its input, which predicts token i + 1. So a sequence of
n tokens has n - 1 rows: the row of a turn's last token comes with the next turn. A row has
layers * top_k numbers.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, model_validator

from toolroll.rollout.types import ExpertArray

_SMALL = (np.uint8, np.uint16)


class ExpertsRecord(BaseModel):
    """The JSON form of rows. `data`: the base64 of the little-endian array."""

    model_config = ConfigDict(extra="forbid")

    dtype: Literal["uint8", "uint16", "int32"]
    shape: tuple[int, int]
    data: str

    @model_validator(mode="after")
    def _complete(self) -> ExpertsRecord:
        self.rows()
        return self

    def rows(self) -> ExpertArray:
        """Return the rows. Raise `ValueError` if `data` does not have `shape`."""
        kind = np.dtype(self.dtype).newbyteorder("<")
        values = np.frombuffer(b64decode(self.data, validate=True), dtype=kind)
        return values.reshape(self.shape).astype(self.dtype, copy=False)


def to_json(rows: ExpertArray) -> dict[str, Any]:
    """Return the fields of `ExpertsRecord` for `rows`."""
    data = rows.astype(rows.dtype.newbyteorder("<"), copy=False).tobytes()
    return {"dtype": rows.dtype.name, "shape": rows.shape, "data": b64encode(data).decode()}


def compact(rows: npt.NDArray[Any]) -> ExpertArray:
    """Return a copy of `rows` in the smallest type that holds its numbers: uint8, uint16 or int32.

    An engine may send -1 for an expert that it did not use. Such rows are int32.
    """
    least, highest = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
    small = next((kind for kind in _SMALL if highest <= np.iinfo(kind).max), np.int32)
    return np.array(rows, dtype=small if least >= 0 else np.int32)


def new_rows(
    numbers: npt.NDArray[Any], *, start: int, tokens: int, width: int | None = None
) -> ExpertArray:
    """Return the rows [start, tokens - 1) of a sequence of `tokens` tokens, compact.

    `numbers` is what an engine sent: these rows, or the rows from 0 if it ignores the requested
    `start`. Their count tells which, so without `width`, the length of a row, they must be all
    rows. Raise `ValueError` for any other count.
    """
    stop = tokens - 1
    width = width or numbers.size // max(stop, 1)
    for first in (start, 0):
        if width and numbers.size == (stop - first) * width:
            return compact(numbers.reshape(-1, width)[start - first :])
    raise ValueError(
        f"{numbers.size} numbers are not the experts of the tokens from {start} or 0 to {stop}, "
        f"with {width} numbers per token"
    )
