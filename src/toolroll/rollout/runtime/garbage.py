"""Run Python's garbage collector less often while many episodes run.

By default, the collector often visits all live objects, although the running episodes still use
nearly all of them. Rare collections are enough, because reference counts free a finished episode.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

THRESHOLD = (50_000, 20, 100)


class _Pace:
    """The collector settings of the process. The first `paced_garbage` context changes them, and
    the last one restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = gc.get_threshold()

    def begin(self) -> bool:
        """Enter a context, and change the settings if it is the first one. Return False if the
        collector is off, or if other code has frozen objects.
        """
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
        """Leave a context, and restore the settings if it is the last one."""
        with self._lock:
            self._users -= 1
            if not self._users:
                gc.set_threshold(*self._before)
                gc.unfreeze()


_PACE = _Pace()


@contextlib.contextmanager
def paced_garbage(*, enabled: bool = True) -> Iterator[None]:
    """Freeze the existing objects and collect less often, in the whole process.

    If several of these contexts overlap, the settings are restored when the last one ends. Do
    nothing if `enabled` is False, if the collector is off, or if other code has frozen objects.
    """
    begun = enabled and _PACE.begin()
    try:
        yield
    finally:
        if begun:
            _PACE.end()
