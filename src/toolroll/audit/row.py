"""`Row`: one training sequence, as `audit` checks it. `row_of` reads it from a trainer's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import IdArray, LogprobArray, Message, Tool

IGNORED = -100
"""The label of a token that is not trained."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence of n tokens.

    `place`: the file and the number of the row. `ids`: int32 [n]. `trained`: bool [n], True if the
    loss counts the token. `logprobs`: float32 [n], NaN if the row has none for the token.
    `labels`: int64 [n], if the row has labels instead of a mask. `forked`: the row may continue
    another row of its episode, or `messages` may have turns that are not in this row.
    """

    place: str
    ids: IdArray
    trained: npt.NDArray[np.bool_]
    logprobs: LogprobArray
    labels: npt.NDArray[np.int64] | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    forked: bool = False

    def spans(self) -> list[tuple[int, int]]:
        """Return the range [start, stop) of each run of trained tokens."""
        return runs(self.trained)


def runs(values: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the range [start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], values, [False]]))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def row_of(data: Mapping[str, Any], place: str) -> Row:
    """Return the row in `data`.

    The ids are in `input_ids` or `tokens`, the mask in `loss_mask` or as -100 in `labels`, and the
    logprobs, which may be missing, in `logprobs` or `rollout_log_probs`. The mask and the logprobs
    have one value for each token, or for each of the last `response_length` tokens. Raise
    `UsageError` if a field is missing or cannot be read.
    """
    fields = _Fields(data, place)
    ids = fields.numbers("input_ids", "tokens", kinds="iu")
    n = len(ids)
    labels = fields.numbers("labels", kinds="iu", size=n) if data.get("labels") is not None else None
    if labels is not None:
        trained = labels != IGNORED
    elif data.get("loss_mask") is None and data.get("response_length") is not None:
        trained = np.arange(n) >= n - int(data["response_length"])  # slime trains them all
    else:
        trained = fields.numbers("loss_mask", kinds="iub", size=n) != 0
    if data.get("remove_sample"):
        trained[:] = False
    logprobs = np.full(n, np.nan, np.float32)
    if fields.name("logprobs", "rollout_log_probs") is not None:
        logprobs = fields.numbers("logprobs", "rollout_log_probs", kinds="f", size=n)
        logprobs = logprobs.astype(np.float32)
        logprobs[~trained & (logprobs == 0.0)] = np.nan  # what many trainers write for "none"
    return Row(
        place,
        ids.astype(np.int32),
        trained,
        logprobs,
        labels,
        fields.decoded("messages"),
        fields.decoded("tools"),
        bool(data.get("sequence") or data.get("fork_reason")),
    )


class _Fields:
    """Reads the fields of one row."""

    def __init__(self, data: Mapping[str, Any], place: str) -> None:
        self._data = data
        self._place = place

    def name(self, *names: str) -> str | None:
        """Return the first of `names` that the row has."""
        return next((name for name in names if self._data.get(name) is not None), None)

    def numbers(self, *names: str, kinds: str, size: int | None = None) -> npt.NDArray[Any]:
        """Return the list of numbers in the first of `names` that the row has.

        `kinds`: numpy's letters of the types that are allowed. `size`: the number of tokens; the
        values of the response alone are preceded by zeros.
        """
        name = self.name(*names)
        if name is None:
            raise self._error(names[0], f"is missing: a row needs {' or '.join(names)}")
        value = self._data[name]
        try:
            found = np.array(value, dtype=np.float64 if kinds == "f" else None)
        except (TypeError, ValueError) as error:
            raise self._error(name, f"is no list of numbers: {error}") from error
        if found.ndim != 1 or not (found.dtype.kind in kinds or not found.size):
            raise self._error(name, f"is no list of numbers of one row, but {value!r:.80}")
        left = 0 if size is None else size - len(found)
        if left and len(found) != self._data.get("response_length"):
            raise self._error(name, f"has {len(found)} values, but the row has {size} tokens")
        return np.concatenate([np.zeros(left, found.dtype), found]) if left else found

    def decoded(self, name: str) -> Any:
        """Return the list `name`, which may be JSON text, or None."""
        value = self._data.get(name)
        if isinstance(value, str):
            try:
                value = orjson.loads(value)
            except ValueError as error:
                raise self._error(name, f"is not JSON: {error}") from error
        if value is not None and not isinstance(value, list):
            raise self._error(name, f"is no list, but {value!r:.80}")
        return value

    def _error(self, name: str, problem: str) -> UsageError:
        return UsageError(f"{self._place}: {name} {problem}")
