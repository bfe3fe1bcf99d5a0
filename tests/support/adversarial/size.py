"""The size of the adversarial suite: a seeded sample, or everything."""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
FULL = os.environ.get("TOOLROLL_ADVERSARIAL") == "full"
SEED = os.environ.get("TOOLROLL_ADVERSARIAL_SEED", "0")


def sampled(items: Sequence[T], count: int) -> list[T]:
    """`count` of `items`, the same for the same seed; all of them for the whole suite."""
    if FULL or count >= len(items):
        return list(items)
    return random.Random(SEED).sample(list(items), count)
