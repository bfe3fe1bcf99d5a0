"""Python's garbage collector at a pace that fits many episodes in the air.

By default it visits all live objects again and again while a thousand episodes hold them. What an
episode leaves is freed by reference counts, so that rounds may be rare.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLD = (50_000, 20, 100)


@contextlib.contextmanager
def paced_garbage(*, enabled: bool = True) -> Iterator[None]:
    """Freeze what is there and let the collector come seldom, for the whole process, until the
    context ends.

    Do nothing if `enabled` is False, the collector is off, or objects are frozen already (a
    context within another).
    """
    if not enabled or not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
