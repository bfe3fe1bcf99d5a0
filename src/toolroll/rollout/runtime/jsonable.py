"""`to_jsonable`: converts any value to a value that JSON can represent, so that every episode can
be stored.

Invariants:

- It never raises an error, whatever an environment returned.
- Writing the result as JSON and reading it back gives the same values, but NaN and infinity become
  null.
- Arrays and JSON types are unchanged. Lone surrogates in text are replaced. Keys become text.
- An integer that needs more than 64 bits becomes the text of its digits. A value that is nested too
  deep, or contains itself, becomes text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import date, time
from enum import Enum
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel

from toolroll.rollout.runtime.foreign import guarded
from toolroll.rollout.runtime.unicode import replace_surrogates

_DEEPEST = 100
"""The maximum nesting. orjson refuses more than 254 levels."""
_MOST_KEYS = 100_000
LARGEST = 1e100
"""The largest number that an episode may contain. Sums of larger numbers could become infinite."""
_BITS = 10_000
"""Integers with more bits than this are written in hexadecimal, because Python limits the number of
decimal digits.
"""


def to_jsonable(value: Any) -> Any:
    """Return `value` as JSON types and arrays. Other objects in it become dicts, lists or text."""
    return _storable(value, ())


def _storable(value: Any, around: tuple[int, ...]) -> Any:
    """Convert `value`. `around` contains the `id()` of each container that contains `value`."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool) or type(value) is float:
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else _digits(value)
    if isinstance(value, str):
        return replace_surrogates(str(value))
    if len(around) >= _DEEPEST or id(value) in around:
        return _text_of(value)
    try:
        with guarded():
            return _parts(value, (*around, id(value)))
    except Exception:  # noqa: BLE001 - a third-party class may raise anything
        return _text_of(value)


def _parts(value: Any, around: tuple[int, ...]) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        is_plain = (
            value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 and value.flags.c_contiguous
        )
        return value if is_plain and value.dtype.isnative else _storable(value.tolist(), around)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return _mapping(value, around)
    if isinstance(value, list | tuple):
        return [_storable(item, around) for item in value]
    if isinstance(value, BaseModel):
        return _storable(value.model_dump(), around)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _storable(getattr(value, field.name), around) for field in fields}
    return _storable(as_text(value), around)


def _mapping(value: Mapping[Any, Any], around: tuple[int, ...]) -> dict[str, Any]:
    items: dict[str, Any] = {}
    for key, item in value.items():
        if len(items) == _MOST_KEYS:
            raise ValueError("a mapping has too many keys: it may be endless")
        name = key_text(key)
        while name in items:  # the keys 1 and "1" have the same text
            name += "'"
        items[name] = _storable(item, around)
    return items


def _digits(number: int) -> str:
    return str(number) if number.bit_length() <= _BITS else hex(number)


def plain(value: Any) -> Any:
    """Return `value` after a round trip through JSON, so that it contains only JSON types."""
    return orjson.loads(json_bytes(value))


def json_bytes(value: Any, *, option: int = 0) -> bytes:
    """Return `value` as JSON. Values that JSON cannot represent become text (`to_jsonable`).
    `option`: options of orjson.
    """
    # Without OPT_NON_STR_KEYS, because it would write the keys 1 and "1" as the same key.
    option |= orjson.OPT_SERIALIZE_NUMPY
    try:
        return orjson.dumps(value, option=option, default=as_text)
    except TypeError:  # a lone surrogate, a huge integer, a key that is not text, deep nesting
        return orjson.dumps(to_jsonable(value), option=option, default=as_text)


def ids_json(ids: npt.NDArray[np.int32]) -> bytes:
    """Return `ids` as a JSON list without its brackets, so that lists can be joined."""
    return orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def as_text(value: Any) -> Any:
    """Return text, or a JSON type, for a value that JSON cannot represent."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, set | frozenset):
        return sorted(map(_text_of, value))
    if isinstance(value, Mapping):
        return _mapping(value, (id(value),))
    return _text_of(value)


def key_text(key: Any) -> str:
    """Return a key of a mapping as the key of a JSON object."""
    if isinstance(key, Enum):
        key = key.value
    if key is None or isinstance(key, bool):
        return "null" if key is None else str(key).lower()
    return _text_of(key)


def _text_of(value: Any) -> str:
    """Return the text of `value`, without its address. If its class raises an error, return the
    name of its type.
    """
    try:
        with guarded():
            text = (
                str(value) if isinstance(value, str | float | date | time | UUID) else repr(value)
            )
            return replace_surrogates(str(text).replace(f" at {id(value):#x}", ""))
    except Exception:  # noqa: BLE001 - a third-party class may raise anything
        return f"<{type(value).__name__}>"


def finite(value: Any) -> float | None:
    """Return `value` as a float, or None if it is not a finite number of at most `LARGEST`."""
    if isinstance(value, str | bytes | bytearray):
        return None
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "biuf":
        return None  # NumPy would drop the imaginary part of a complex number
    try:
        with guarded():
            number = float(value)
    except Exception:  # noqa: BLE001 - a third-party class may raise anything
        return None
    return number if abs(number) <= LARGEST else None


def shown(value: Any, limit: int = 100) -> str:
    """Return the beginning of `repr(value)` for a message."""
    text = _text_of(value) if not isinstance(value, str) else repr(value[: 2 * limit])
    return text if len(text) <= limit else f"{text[:limit]} ..."


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two texts or lists."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
