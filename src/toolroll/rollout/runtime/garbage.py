"""Run Python's garbage collector less often while many episodes are in flight.

By default it visits all live objects again and again while a thousand episodes hold them. An
episode is freed by reference counts, so collections may be rare.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

THRESHOLD = (50_000, 20, 100)


class _Pace:
    """The process's collector settings: changed by the first user, restored after the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = gc.get_threshold()

    def begin(self) -> bool:
        """Return False if the collector is off, or its objects are frozen by somebody else."""
        with self._lock:
            if not self._users:
                if not gc.isenabled() or gc.get_freeze_count():
                    return False
                self._before = gc.get_threshold()
                gc.collect()
                gc.freeze()
                gc.set_threshold(*THRESHOLD)
            self._users += 1
            return True

    def end(self) -> None:
        """Restore the settings after the last user."""
        with self._lock:
            self._users -= 1
            if not self._users:
                gc.set_threshold(*self._before)
                gc.unfreeze()


_PACE = _Pace()


@contextlib.contextmanager
def paced_garbage(*, enabled: bool = True) -> Iterator[None]:
    """Freeze the existing objects and collect less often, in the whole process, until the
    last of these contexts ends, in whatever order.

    Do nothing if `enabled` is False, the collector is off, or somebody else has frozen objects.
    """
    if not enabled or not _PACE.begin():
        yield
        return
    try:
        yield
    finally:
        _PACE.end()
