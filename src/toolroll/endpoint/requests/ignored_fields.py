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


def has_content(name: str, value: Any) -> bool:
    """Return True if models would see the field `name` of a message."""
    return name in _CONTENT


def never(name: str, value: Any) -> bool:
    """Return False: of a part, only the text is content."""
    return False


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
        names: Collection[str],
        place: str,
        refuses: Callable[[str, Any], bool] = has_content,
    ) -> None:
        """Add each of `fields`, the object at `place`, that has a value and is not in `names`.
        Raise `ApiError` for one for which `refuses(name, value)` is True.
        """
        for name, value in fields.items():
            if not value or name in names:
                continue
            if refuses(name, value):
                raise not_rendered(f"{place}.{name}")
            self.add(f"{place}.{name}")
