"""`watched_loop`: logs a warning that names the call if code blocks the event loop.

asyncio's time limits need the event loop, so they cannot end such code (docs/reliability.md). A
thread asks the loop for a sign of life, and reads the name of the task that runs instead.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_INTERVAL = 1.0


@contextmanager
def watched_loop(*, seconds: float = 5.0) -> Iterator[None]:
    """Log a warning whenever a task blocks the running event loop for `seconds`."""
    loop, ident = asyncio.get_running_loop(), threading.get_ident()
    ended = threading.Event()

    def look() -> None:
        alive = threading.Event()
        while not ended.wait(min(_INTERVAL, seconds)):
            alive.clear()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(alive.set)
            if not alive.wait(seconds) and not ended.is_set():
                _warn(loop, ident, seconds)
                alive.wait()

    # Not joined, because the loop's thread may have to show the sign of life.
    threading.Thread(target=look, name="toolroll-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _warn(loop: asyncio.AbstractEventLoop, ident: int, seconds: float) -> None:
    task, frame = asyncio.current_task(loop), sys._current_frames().get(ident)
    place = ""
    if frame is not None:
        code = frame.f_code
        place = f" ({Path(code.co_filename).name}, line {frame.f_lineno}, in {code.co_name})"
    logger.warning(
        "%s has blocked the event loop for %g s%s: it runs on the event loop, so it must await, or "
        "run blocking code in a thread",
        "a callback" if task is None else task.get_name(),
        seconds,
        place,
    )
