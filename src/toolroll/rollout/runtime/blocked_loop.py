"""`watched_loop`: logs a warning that names the call if code blocks the event loop.

asyncio's time limits need the event loop, so they cannot end such code (docs/reliability.md). A
thread asks the loop for a sign of life, and reads the name of the task that runs instead. If the
loop had no processor meanwhile, no code is to blame, and the warning says so.
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
_OVERLOADED = (
    "this machine is overloaded: the event loop waited for a processor for %.1f of %g s, so that "
    "time limits may end calls that are not slow (said once)"
)


@contextmanager
def watched_loop(*, seconds: float = 5.0) -> Iterator[None]:
    """Log a warning whenever a task blocks the running event loop for `seconds`, and one if the
    machine is overloaded.
    """
    loop, ended = asyncio.get_running_loop(), threading.Event()
    ident, thread = threading.get_ident(), threading.get_native_id()

    def look() -> None:
        alive, overloaded = threading.Event(), False
        while not ended.wait(min(_INTERVAL, seconds)):
            alive.clear()
            before = _waited(thread)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(alive.set)
            if alive.wait(seconds) or ended.is_set():
                continue
            waited = _waited(thread) - before
            if waited < seconds / 2:
                _warn(loop, ident, seconds)
            elif not overloaded:
                overloaded = True
                logger.warning(_OVERLOADED, waited, seconds)
            alive.wait()

    # Not joined, because the loop's thread may have to show the sign of life.
    threading.Thread(target=look, name="toolroll-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _waited(thread: int) -> float:
    """Return the seconds for which a thread of this process was ready, but had no processor, since
    its start. 0.0 if the system does not say: only Linux does.
    """
    try:
        numbers = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()
    except OSError:
        return 0.0
    return int(numbers[1]) / 1e9


def _warn(loop: asyncio.AbstractEventLoop, ident: int, seconds: float) -> None:
    task, frame = asyncio.current_task(loop), sys._current_frames().get(ident)
    location = ""
    if frame is not None:
        code = frame.f_code
        location = f" ({Path(code.co_filename).name}, line {frame.f_lineno}, in {code.co_name})"
    logger.warning(
        "%s has blocked the event loop for %g s%s: it runs on the event loop, so it must await, or "
        "run blocking code in a thread",
        "a callback" if task is None else task.get_name(),
        seconds,
        location,
    )
