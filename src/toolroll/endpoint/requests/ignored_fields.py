"""`IgnoredFields`: the fields of one request that the endpoint ignores."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from toolroll.endpoint.errors import not_rendered

_CONTENT = frozenset(
    {"audio", "content", "function_call", "name", "reasoning", "reasoning_content", "refusal"}
    | {"tool_call_id", "tool_calls"}
)
"""Fields of messages that models would see. Where the endpoint cannot render them, it says so."""
_INDEX = re.compile(r"\[\d+\]")
_MOST, _LONGEST = 32, 100


class IgnoredFields:
    """The paths of fields that are in a request, but change no token: of at most 32 fields, and at
    most 100 characters of each. Paths have no indexes: `messages[].extra`.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def add(self, place: str) -> None:
        """Add the field at `place`, such as `messages[3].extra`."""
        if len(self.paths) < _MOST:
            self.paths.add(_INDEX.sub("[]", place)[:_LONGEST])

    def add_others(
        self,
        fields: Mapping[str, Any],
        known: Collection[str],
        place: str,
        shown: Callable[[str, Any], bool] = lambda name, value: False,
    ) -> None:
        """Add each of `fields`, the object at `place`, that has a value and is not in `known`.
        Raise `ApiError` for a field with content, and for one for which `shown(name, value)` is
        True: the chat template may show it.
        """
        for name, value in fields.items():
            if not value or name in known:
                continue
            if name in _CONTENT or shown(name, value):
                raise not_rendered(f"{place}.{name}")
            self.add(f"{place}.{name}")
