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
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    "string_type": "must be a text",
    "dict_type": "must be a mapping",
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "string_too_short": "must have at least {min_length} characters",
}
"""Messages by pydantic's error type. Other types keep pydantic's own message."""
_QUOTED = _WORDS.keys() - {
    "missing", "extra_forbidden", "string_too_short", "dict_type", "list_type", "tuple_type"
}  # fmt: skip
"""The types whose messages quote the value: none of them can be a secret."""
_LONGEST = 100


def did_you_mean(
    name: str,
    names: Iterable[str],
    otherwise: str = "",
    *,
    beginnings: bool = False,
    name_of: Callable[[str], str] = str,
) -> str:
    """Return `; did you mean 'NAME'?` with the closest of `names`, spelled by `name_of`, or
    `otherwise` if none is close. With `beginnings`, two names are also close if one of them begins
    with the other.
    """
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    if beginnings and not close and len(name) > 2:
        close = sorted(n for n in names if n.startswith(name) or name.startswith(n))
    return f"; did you mean {name_of(close[0])!r}?" if close else otherwise


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
