"""`Row`: one training sequence, as `audit` checks it. `row_of` reads it from a trainer's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import IdArray, LogprobArray, Message, Tool

IGNORED = -100
"""The label of a token that is not trained."""


class Fault(NamedTuple):
    """A fault of a row, in its tokens [start, stop). `sure`: False if only the engine's record can
    decide whether it is a fault.
    """

    kind: str
    start: int
    stop: int
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence of n tokens.

    `place`: the file and the number of the row. `ids`: int32 [n]. `trained`: bool [n], True if the
    loss counts the token. `logprobs`: float32 [n], NaN where the row has none. `labels`: int64 [n],
    if the row has them. `forked`: `messages` may have turns that are not in this row.
    """

    place: str
    ids: IdArray
    trained: npt.NDArray[np.bool_]
    logprobs: LogprobArray
    labels: npt.NDArray[np.int64] | None
    messages: list[Message]
    tools: list[Tool]
    forked: bool

    def spans(self) -> list[tuple[int, int]]:
        """Return the range [start, stop) of each run of trained tokens."""
        return runs(self.trained)


def runs(values: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the range [start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], values, [False]]))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def row_of(data: Mapping[str, Any], place: str) -> Row:
    """Return the row in `data`, the fields of one of these kinds:

    - `input_ids`, with `loss_mask` (0 or 1) or `labels` (-100 if not trained), and with `logprobs`
      if there are any (null where a token was not sampled);
    - slime's `tokens` and `response_length`, and its `loss_mask` and `rollout_log_probs`, which
      cover only the response.

    `messages` and `tools` are optional. Raise `UsageError` if a field is missing or cannot be read.
    """
    ids = _numbers(data, place, "input_ids", "tokens").astype(np.int32)
    labels = None
    if data.get("labels") is not None:
        labels = _numbers(data, place, "labels", size=len(ids)).astype(np.int64)
        trained = labels != IGNORED
    elif data.get("loss_mask") is None and "response_length" in data:
        trained = np.arange(len(ids)) >= len(ids) - data["response_length"]  # slime trains it all
    else:
        mask = _numbers(data, place, "loss_mask", size=len(ids))
        for at in np.flatnonzero((mask != 0) & (mask != 1))[:1].tolist():
            raise UsageError(f"{place}: loss_mask is {mask[at]:g} at token {at}: it must be 0 or 1")
        trained = mask == 1
    logprobs = np.full(len(ids), np.nan, np.float32)
    for name in ("logprobs", "rollout_log_probs"):
        if data.get(name) is not None:
            values = _numbers(data, place, name, size=len(ids), whole=False)
            logprobs = values.astype(np.float32)
            logprobs[~trained & (logprobs == 0.0)] = np.nan  # many trainers write 0 for "none"
    forked = bool(data.get("sequence") or data.get("fork_reason") or data.get("env") == "serve")
    messages, tools = (_decoded(data, place, name) for name in ("messages", "tools"))
    return Row(place, ids, trained, logprobs, labels, messages, tools, forked)


def _numbers(
    data: Mapping[str, Any], place: str, *names: str, size: int | None = None, whole: bool = True
) -> npt.NDArray[np.float64]:
    """Return the numbers in the first of `names` that `data` has, one for each of `size` tokens.
    None becomes NaN if the numbers need not be `whole`.
    """
    name = next((name for name in names if data.get(name) is not None), None)
    if name is None:
        raise UsageError(f"{place}: there is no {' or '.join(names)}")
    values = data[name]
    try:
        texts = len(values) > 0 and isinstance(values[0], str)  # which numpy would read
        numbers = np.array(None if texts else values, np.float64)
    except (TypeError, ValueError):
        numbers = np.array(None, np.float64)
    if numbers.ndim == 1 and size and size > len(numbers) == data.get("response_length"):
        numbers = np.concatenate([np.zeros(size - len(numbers)), numbers])
    if numbers.ndim != 1:
        raise UsageError(f"{place}: {name} must be a list of numbers, one for each token")
    if size not in (None, len(numbers)):
        raise UsageError(f"{place}: {name} has {len(numbers)} values for {size} tokens")
    if whole and (broken := np.flatnonzero(numbers % 1)).size:
        at = broken[0]
        raise UsageError(f"{place}: {name} is {numbers[at]:g} at token {at}: not a whole number")
    return numbers


def _decoded(data: Mapping[str, Any], place: str, name: str) -> list[dict[str, Any]]:
    """Return a list of objects, which may be JSON text."""
    value = data.get(name) or []
    try:
        value = orjson.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UsageError(f"{place}: {name} is not JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UsageError(f"{place}: {name} must be a list of objects")
    return value
