"""Error messages about settings: pydantic's validation errors in plain words, and the known name
that is closest to a misspelled one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from pydantic import ValidationError

_WORDS = {
    "missing": "must be given",
    "extra_forbidden": "is not a setting",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be {expected}",
    "int_parsing": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
    "string_too_short": "must have at least {min_length} characters",
}
"""Messages by pydantic's error type. Other types keep pydantic's own message."""
_QUOTED = _WORDS.keys() - {"missing", "extra_forbidden", "string_too_short"}
"""The types whose messages quote the value: none of them can be a secret."""
_LONGEST = 100


def did_you_mean(
    name: str, names: Iterable[str], otherwise: str = "", *, cutoff: float = 0.6
) -> str:
    """Return `; did you mean 'NAME'?` with the closest of `names`, or `otherwise` if none is
    close.
    """
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else otherwise


def complaints(error: ValidationError, name_of: Callable[[str], str] = str) -> str:
    """Return all errors in one line, each as `NAME: MESSAGE`. An error about several settings has
    only the message.

    `name_of` converts a setting to the name that the user knows, such as a flag. The parts of a
    nested setting are joined with dots.
    """
    parts = []
    for item in error.errors(include_url=False):
        setting = ".".join(map(str, item["loc"]))
        message = _words(item["type"], item["msg"], item.get("ctx"))
        if item["type"] in _QUOTED:
            message += f", not {repr(item['input'])[:_LONGEST]}"
        parts.append(f"{name_of(setting)}: {message}" if setting else message)
    return "; ".join(parts)


def _words(kind: str, message: str, context: dict[str, object] | None) -> str:
    if kind in _WORDS:
        return _WORDS[kind].format(**(context or {}))
    text = message.removeprefix("Value error, ")
    return f"must be {text[16:]}" if text.startswith("Input should be ") else text
