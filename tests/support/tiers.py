"""The quick tier: the number of examples of each property, and the templates.

The tiers are `make test` (tests/unit without the marker `slow`), `make test-all` (everything but
`peers`), and by hand `make test-peers` and `make fuzz`. HYPOTHESIS_PROFILE names the profile: `dev`
(the default), `ci` (`make test-all`) or `nightly`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = {"fast": 4, "dev": 20, "ci": 100, "nightly": 2000}
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
    off = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ]
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


def _examples() -> int:
    profile = settings.default
    assert profile is not None
    return profile.max_examples


def costly(share: int = 4) -> settings:
    """The profile with one of `share` examples, for properties whose examples play whole
    episodes.
    """
    return settings(max_examples=max(1, _examples() // share))


def fuzz_texts() -> int:
    """How many random texts a parser reads: TOOLROLL_FUZZ, or as many as suit the profile."""
    return int(os.environ.get("TOOLROLL_FUZZ", 15 * _examples()))


def by_tier(templates: Iterable[str]) -> list[Any]:
    """The templates as parameters of a test: all but the representative ones have the marker
    `slow`.
    """
    return [
        name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.slow)
        for name in templates
    ]
