"""`first_difference`: where two JSON values differ, and how a message shows it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from toolroll.rollout.runtime.jsonable import common_prefix, shown

_EXCERPT = 80  # characters of a value in a message


def first_difference(first: Any, second: Any, path: str = "") -> tuple[str, Any, Any]:
    """Return the path of the first difference between two JSON values, such as
    `messages[0].content`, and the value of each at this path (None if it is missing).
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in {**first, **second}:
            if first.get(name) != second.get(name):
                key_path = f"{path}.{name}" if path else name
                return first_difference(first.get(name), second.get(name), key_path)
    elif isinstance(first, list) and isinstance(second, list):
        for position, (left, right) in enumerate(zip_longest(first, second)):
            if left != right:
                return first_difference(left, right, f"{path}[{position}]")
    return path, first, second


def excerpts(first: Any, second: Any) -> tuple[str, str]:
    """Return the beginning of each value. If both are texts, begin shortly before the first
    character that differs.
    """
    if not isinstance(first, str) or not isinstance(second, str):
        return shown(first, _EXCERPT), shown(second, _EXCERPT)
    start = max(0, common_prefix(first, second) - _EXCERPT // 3)
    cut = "... " * (start > 0)
    return cut + shown(first[start:], _EXCERPT), cut + shown(second[start:], _EXCERPT)
