"""`BoundedValidator`: checks values against untrusted JSON schemas (draft 2020-12).

Invariants: a schema's regular expressions are ignored, because Python's `re` may take exponential
time. Nothing is fetched for a `$ref`, and a check ends after `MOST_STEPS` steps. If one of these
two limits prevents a check, `NotChecked` is raised.
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

from toolroll.parsers.reading.resolve import NOT_A_SCHEMA, TYPES

MOST_STEPS = 50_000
"""The maximum number of steps of one check. A step is one keyword for one value, 16 items of a
value, or 1000 characters of an error, and takes about 5 us.
"""
MOST_OBJECTS = 2000
"""The maximum number of objects in a schema. Validating the schema takes 150 us per object."""

_Errors = Iterator[ValidationError]
Keyword = Callable[[Any, Any, Any, Any], _Errors | None]

_LEFT: ContextVar[list[int]] = ContextVar("left")
_PATTERNS = ("pattern", "patternProperties")
_BY_PATTERN = ("additionalProperties", "unevaluatedProperties")
_NO_FORMATS = FormatChecker(())  # a format's check would compile each `pattern`
_NOTHING_REMOTE: Registry[Any] = Registry()


class NotChecked(Exception):
    """The schema cannot be checked, or a value cannot be checked against the schema."""


class BoundedValidator:
    """Checks values against `schema`. Raises `NotChecked` if the schema is too large or not
    valid.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        document = {name: value for name, value in schema.items() if name != "$schema"}
        objects = list(_objects(document))
        _refuse(objects)
        with _bounded():
            Draft202012Validator.check_schema(document, format_checker=_NO_FORMATS)
        named = any("patternProperties" in item for item in objects)
        self._validator = (_WITHOUT_NAMES if named else _BOUNDED)(
            document, registry=_NOTHING_REMOTE
        )

    def first_problem(self, value: Any) -> ValidationError | None:
        """Return the most relevant error in `value`, or None. Raises `NotChecked` if `value` cannot
        be checked.
        """
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
    """Raise `NotChecked` if checks against a schema with these `objects` may take too long."""
    if len(objects) > MOST_OBJECTS:
        raise NotChecked(f"the schema has {len(objects)} objects, more than {MOST_OBJECTS}")
    for item in objects:
        if isinstance(item.get("$schema"), str):
            # jsonschema would use the validator of that draft, which is not bounded.
            raise NotChecked("a part of the schema names its own draft")
        kinds = item.get("type")
        if isinstance(kinds, list) and len(kinds) > len(TYPES):
            # Validating the schema would compare all pairs of types.
            raise NotChecked("the schema names more types than exist")


@contextmanager
def _bounded() -> Iterator[None]:
    """Limit the code in the `with` block to `MOST_STEPS` steps. Raises `NotChecked` if it takes
    more, or if the schema cannot be applied.
    """
    token = _LEFT.set([MOST_STEPS])
    try:
        yield
    except (SchemaError, UnknownType, OverflowError, *NOT_A_SCHEMA) as error:
        raise NotChecked(f"the schema cannot be applied: {error}") from error
    finally:
        _LEFT.reset(token)


def _counted(check: Keyword) -> Keyword:
    """Return a keyword check that does what `check` does, and counts its steps."""

    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
        _spend(1 + (_length(value) + _length(instance)) // 16)
        for error in check(validator, value, instance, schema) or ():
            _spend(len(error.message) // 1000)  # most messages quote the value
            yield error

    return counted


def _unique_items(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors | None:
    """Check `uniqueItems`, which may compare all pairs of items."""
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
"""The validator for schemas with `patternProperties`. `additionalProperties` and
`unevaluatedProperties` apply to the properties that match no pattern. Patterns are never evaluated,
so this validator ignores these two keywords.
"""
