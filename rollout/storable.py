"""`storable`: what an episode holds, as values that JSON can write, so that no episode is lost for one of them.

Invariants: arrays, and whatever JSON knows, stay what they are; surrogates are replaced; an integer that needs more than 64 bits
becomes its digits; what is nested too deep, or is in itself, becomes text.
"""

from __future__ import annotations

import dataclasses
from datetime import date, time
from enum import Enum
from typing import Any
from uuid import UUID

import numpy as np
import orjson
from pydantic import BaseModel

from toolroll.rollout.surrogates import without_surrogates

_DEEPEST = 100
"""orjson gives up at 254 levels."""


def storable(value: Any, depth: int = 0) -> Any:
    """`value` with everything in it that orjson refuses put in words."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | float | np.ndarray | np.generic | date | time | UUID):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, str):
        return without_surrogates(value)
    if depth >= _DEEPEST:
        return without_surrogates(repr(value))
    if isinstance(value, dict):
        return {_key(key): storable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item, depth + 1) for item in value]
    if isinstance(value, BaseModel):
        return storable(value.model_dump(), depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: storable(getattr(value, field.name), depth + 1) for field in dataclasses.fields(value)}
    return storable(as_text(value), depth + 1)


def plain(value: Any) -> Any:
    """`value` as JSON gives it back: dicts, lists, texts, numbers, and nothing else."""
    try:
        return orjson.loads(orjson.dumps(value, option=_OPTIONS, default=as_text))
    except TypeError:
        return orjson.loads(orjson.dumps(storable(value), option=_OPTIONS, default=as_text))


_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def as_text(value: Any) -> Any:
    """What an environment left behind that JSON does not know: shown as text."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return repr(value)


def _key(key: Any) -> Any:
    kept = storable(key)
    return kept if kept is None or isinstance(kept, str | int | float) else without_surrogates(str(key))
