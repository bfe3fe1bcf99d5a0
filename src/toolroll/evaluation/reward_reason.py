"""`reward_reason`: the reason for an episode's reward, as one line of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_KEYS = ("reward_reason", "reason", "failure")  # keys with a text
_LONGEST = 300
_LEAVES = 8
_DEEPEST = 20


def reward_reason(info: Mapping[str, Any]) -> str:
    """Return the reason for the reward as one line, or "" if `info` has none.

    The reason is the first of these that `info` has: `error`, the text under one of `_KEYS`, or the
    numbers and truth values in `reward_info` (tau-bench and tau2 write them).
    """
    error = info.get("error")
    if isinstance(error, Mapping):
        return _short(f"{error.get('type')}: {error.get('message')}")
    for key in _KEYS:
        if isinstance(info.get(key), str) and info[key]:
            return _short(info[key])
    parts = info.get("reward_info")
    if not isinstance(parts, Mapping):
        return ""
    leaves = [part for part in _leaves(parts) if not part.startswith("reward ")]
    return _short(", ".join(leaves[:_LEAVES]))


def _leaves(parts: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield each number and truth value in `parts` with its key."""
    for key, value in parts.items():
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _leaves(value, depth + 1)
        elif isinstance(value, bool):
            yield f"{key} {'yes' if value else 'no'}"
        elif isinstance(value, int | float):
            yield f"{key} {value:g}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
