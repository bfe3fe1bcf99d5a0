"""A limit on the nesting of JSON. orjson reads 1024 levels but writes only 254. The limit is lower,
so that data that was accepted can also be written inside other objects.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

DEEPEST = 200
"""The maximum number of levels of a body."""
_SPARE = 54


def too_deep(data: Any, *, around: int = 0) -> bool:
    """Return True if `data` would have more than `DEEPEST` levels inside `around` other objects."""
    for _ in range(_SPARE + around):
        data = [data]
    try:
        orjson.dumps(data)
    except orjson.JSONEncodeError:
        return True
    return False


def too_deep_text(text: str) -> bool:
    """Return True if `text` is nested too deep for Python's `json` module, with which chat
    templates read the arguments of calls. Return False if `text` is not JSON.
    """
    try:
        # spare levels, because the stack may be deeper when a template is rendered
        json.loads("[" * _SPARE + text + "]" * _SPARE)
    except RecursionError:
        return True
    except ValueError:
        return False
    return False
