"""Count the memory that a function takes, to detect work on large texts and numbers without a
clock.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def peak(call: Callable[[], object]) -> int:
    """The bytes that `call` takes at most at any one time."""
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if started:
            tracemalloc.stop()
