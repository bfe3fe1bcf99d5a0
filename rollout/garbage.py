"""The cyclic garbage collector, run by the clock while many episodes are in the air.

Python collects whenever enough objects were made. With a thousand requests under way each of its rounds finds their objects alive, so
it visits all of them again and again: a fifth of the client's CPU, and pauses of the whole event loop. Nearly nothing in a rollout is
cyclic garbage (what an episode leaves is freed by reference counts), so a round every few seconds is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import AsyncIterator

SECONDS = 20.0
_WHOLE = 30
"""One round in so many visits everything; the others visit only what was made since the last one, so that their pauses do not grow
with what a long run or a server holds."""


@contextlib.asynccontextmanager
async def paced_garbage(seconds: float = SECONDS) -> AsyncIterator[None]:
    """Within it the collector runs once in `seconds`, and not in between.

    For a process that is the run's own: it changes the collector for all its threads, and puts it back. Where it is switched off
    already, nothing is done.
    """
    if not gc.isenabled():
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
    for number in itertools.count(1):
        await asyncio.sleep(seconds)
        if number % _WHOLE == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
