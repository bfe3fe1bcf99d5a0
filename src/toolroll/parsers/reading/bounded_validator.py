"""`BoundedValidator`: JSON schema (draft 2020-12) for schemas that a stranger wrote.

Invariants: no regular expression of a schema is evaluated, since Python's `re` may take time that
is exponential in the text; nothing is fetched for a `$ref`; a check ends after `MOST_STEPS` steps.
What cannot be checked for these reasons raises `NotChecked`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError, UnknownType, ValidationError, best_match
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

MOST_STEPS = 50_000
"""Of some 5 us: a keyword for a value, 16 items that it looks at, 1000 characters of an error."""
MOST_OBJECTS = 2000
"""Of a schema: whether it is one takes 150 us for each."""

_Errors = Iterator[ValidationError]
Keyword = Callable[[Any, Any, Any, Any], _Errors | None]

_LEFT: ContextVar[list[int]] = ContextVar("left")
_PATTERNS = ("pattern", "patternProperties")
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_BY_PATTERN = ("additionalProperties", "unevaluatedProperties")
_NO_FORMATS = FormatChecker(())  # a format's check would compile each `pattern`
_NOTHING_REMOTE: Registry[Any] = Registry()


class NotChecked(Exception):
    """The schema, or the value under it, cannot be checked."""


class BoundedValidator:
    """Checks values against `schema`. Raise `NotChecked` if it is too large or of no such draft."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        given = {name: value for name, value in schema.items() if name != "$schema"}
        objects = list(_objects(given))
        _refuse(objects)
        with _bounded():
            Draft202012Validator.check_schema(given, format_checker=_NO_FORMATS)
        named = any("patternProperties" in one for one in objects)
        self._validator = (_WITHOUT_NAMES if named else _BOUNDED)(given, registry=_NOTHING_REMOTE)

    def first_problem(self, value: Any) -> ValidationError | None:
        """Return what is most wrong with `value`, None for nothing. Raise `NotChecked`."""
        with _bounded():
            worst: ValidationError | None = best_match(self._validator.iter_errors(value))
            return worst


def _objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield each object in `schema`."""
    left = [schema]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            yield item
            left += item.values()
        elif isinstance(item, list):
            left += item


def _refuse(objects: list[Mapping[str, Any]]) -> None:
    """Refuse a schema of these `objects` for which a check would not be bounded."""
    if len(objects) > MOST_OBJECTS:
        raise NotChecked(f"the schema has {len(objects)} objects, more than {MOST_OBJECTS}")
    for item in objects:
        if isinstance(item.get("$schema"), str):
            # Such a part would get the validator of that draft, which is not bounded.
            raise NotChecked("a part of the schema names a draft of its own")
        kinds = item.get("type")
        if isinstance(kinds, list) and len(kinds) > len(_TYPES):
            # Whether it is a schema would compare each of them with each.
            raise NotChecked("the schema names more types than there are")


@contextmanager
def _bounded() -> Iterator[None]:
    """Allow `MOST_STEPS` steps. Raise `NotChecked` for more, or if the schema does not apply."""
    token = _LEFT.set([MOST_STEPS])
    try:
        yield
    except (SchemaError, UnknownType, RecursionError, OverflowError, Unresolvable) as error:
        raise NotChecked(f"the schema cannot be applied: {error}") from error
    finally:
        _LEFT.reset(token)


def _counted(check: Keyword) -> Keyword:
    """Return `check`, which counts what it costs."""

    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
        _spend(1 + (_length(value) + _length(instance)) // 16)
        for error in check(validator, value, instance, schema) or ():
            _spend(len(error.message) // 1000)  # most quote the instance
            yield error

    return counted


def _unique_items(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors | None:
    """Check `uniqueItems`, which may compare each item with each."""
    _spend(_length(instance) ** 2 // 16)
    check: Keyword = Draft202012Validator.VALIDATORS["uniqueItems"]
    return check(validator, value, instance, schema)


def _ignored(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    """Check nothing."""


def _spend(steps: int) -> None:
    left = _LEFT.get()
    left[0] -= steps
    if left[0] < 0:
        raise NotChecked(f"the check takes more than {MOST_STEPS} steps")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict)) else 0


_CHECKS: dict[str, Keyword] = {**Draft202012Validator.VALIDATORS, "uniqueItems": _unique_items}
_BOUNDED = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    {name: _ignored if name in _PATTERNS else _counted(check) for name, check in _CHECKS.items()},
)
_WITHOUT_NAMES = extend(  # type: ignore[no-untyped-call]
    _BOUNDED,
    dict.fromkeys(_BY_PATTERN, _ignored),
)
"""For a schema with `patternProperties`: what else a name may be, its patterns decide."""
