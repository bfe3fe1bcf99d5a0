"""The size of the fault suite: a seeded sample in `make test-all`, everything in `make faults`."""

import os
import random
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("TOOLROLL_FAULTS") == "full"
SEED = int(os.environ.get("TOOLROLL_FAULTS_SEED", "17"))
"""Another seed draws another sample."""


def sampled(faults: Iterable[T], count: int) -> list[T]:
    """Return all faults at full size, else `count` of them, in their order."""
    found = list(faults)
    if FULL:
        return found
    chosen = random.Random(SEED).sample(range(len(found)), min(count, len(found)))
    return [found[at] for at in sorted(chosen)]
