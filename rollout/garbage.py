"""The cyclic garbage collector, run by the clock while many episodes are in the air.

Python collects whenever enough objects were made. With a thousand requests under way each of its rounds finds their objects alive, so
it visits all of them again and again: a fifth of the client's CPU, and pauses of the whole event loop. What an episode leaves is freed
by reference counts, so that a round every few seconds is enough, unless an environment makes cyclic garbage of its own: then memory
grows, and a round comes sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic

SECONDS = 5.0
_WHOLE = 120
"""One round in so many visits everything; the others visit only what was made since the last one, so that their pauses do not grow
with what a long run or a server holds."""
_LOOK = 0.5
_GROWTH = 256 * 2**20
"""Bytes that the process may grow by until a round is due before its time: an environment may leave large objects that refer to
themselves."""


@contextlib.asynccontextmanager
async def paced_garbage(seconds: float = SECONDS) -> AsyncIterator[None]:
    """Within it the collector runs once in `seconds`, and when the process has grown by 256 MiB since (on Linux), not in between.

    For a process that is the run's own: it changes the collector for all its threads, and switches it on again at the end. Where it is
    off already, or where objects are frozen, nothing is done.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    rounds = asyncio.create_task(_collect(seconds))
    try:
        yield
    finally:
        rounds.cancel()
        gc.unfreeze()
        gc.enable()


async def _collect(seconds: float) -> None:
    held = resident()
    for number in itertools.count(1):
        end, grown = monotonic() + seconds, False
        while not grown and (left := end - monotonic()) > 0:
            await asyncio.sleep(min(left, _LOOK))
            grown = resident() - held > _GROWTH
        if grown or number % _WHOLE == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        held = resident()


def resident() -> int:
    """Bytes that this process has in memory; 0 where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


_STATM = Path("/proc/self/statm")
