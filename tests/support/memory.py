"""Count the memory that a function or the process takes, to detect work on large texts, numbers
and images without a clock.
"""

import tracemalloc
from collections.abc import Callable
from pathlib import Path


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


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_resident() -> int:
    """The most bytes of memory that this process had at any one time, with those of C code."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    [peak] = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(peak) * 1024
