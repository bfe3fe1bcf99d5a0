"""The quick tier: the number of examples of each property, and the templates.

The tiers are `make test` (tests/unit without the marker `slow`), `make test-all` (everything but
`peers`), and by hand `make test-peers` and `make fuzz`. HYPOTHESIS_PROFILE names the profile: `dev`
(the default), `ci` (`make test-all`) or `nightly`.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers

T = TypeVar("T")

EXAMPLES = {"fast": 4, "dev": 20, "ci": 50, "nightly": 2000}
"""How many examples hypothesis tries of each property."""

REPRESENTATIVE = frozenset(
    {"qwen3", "qwen3_instruct_2507", "llama3_1", "deepseekv3", "glm4moe", "gptoss"}
)
"""One template for each way to fail: history without thoughts, history as served, a beginning of
text, one that is not ASCII and groups results, turns without an end, turns with two ends."""


def load_profile() -> None:
    """Register the profiles and load the one that the environment names.

    `dev` and `ci` try the same examples in each run, so that a failure belongs to the change;
    `nightly` tries others each time. Health checks that measure time are off: no test depends on
    the machine's speed.
    """
    names = ("too_slow", "data_too_large", "filter_too_much", "function_scoped_fixture")
    off = [HealthCheck[name] for name in names]
    for name, examples in EXAMPLES.items():
        settings.register_profile(
            name,
            max_examples=examples,
            derandomize=name != "nightly",
            deadline=None,
            print_blob=True,
            suppress_health_check=off,
        )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def costly(share: int = 4) -> settings:
    """The profile with one of `share` examples, if each example plays whole episodes."""
    profile = settings.default
    assert profile is not None
    return settings(max_examples=max(1, profile.max_examples // share))


def fuzz_texts() -> int:
    """How many random texts a parser reads: TOOLROLL_FUZZ (`make fuzz`: 100,000), or 300."""
    return int(os.environ.get("TOOLROLL_FUZZ", "300"))


def by_tier(templates: Iterable[str]) -> list[Any]:
    """The templates as parameters: all but the representative ones have the marker `slow`."""
    return [
        name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.slow)
        for name in templates
    ]


def by_code(values: Iterable[T], name_of: Callable[[T], str]) -> list[Any]:
    """`values` as parameters of a test, each for the parser named `name_of(value)`. Of parsers that
    differ in their markers only, all but the first have the marker `slow`.
    """
    return [
        pytest.param(value, marks=pytest.mark.slow) if name_of(value) in _repeated() else value
        for value in values
    ]


@cache
def _repeated() -> frozenset[str]:
    """The names of the parsers that differ from an earlier one in their markers only."""
    first: dict[object, str] = {}
    for kind in built_in_parsers():
        first.setdefault(_code_of(kind), kind.name)
    return frozenset(kind.name for kind in built_in_parsers()) - {*first.values()}


def _code_of(kind: type[ToolCallParser]) -> object:
    """The methods of a parser and the form of its settings, without their texts."""
    names = {name for base in kind.__mro__ for name in vars(base) if not name.startswith("__")}
    return tuple((name, _form(getattr(kind, name))) for name in sorted(names - {"name", "aliases"}))


def _form(value: Any) -> object:
    if isinstance(value, str):
        return bool(value)
    if isinstance(value, tuple):
        return tuple(map(_form, value))
    if is_dataclass(value):
        return tuple(_form(getattr(value, field.name)) for field in fields(value))
    return value if callable(value) or isinstance(value, bool | None) else type(value)
