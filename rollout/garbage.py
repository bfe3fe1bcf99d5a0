"""The cyclic garbage collector, run by the clock while many episodes are in the air.

Python collects whenever enough objects were made. With a thousand requests under way each of its rounds finds their objects alive, so
it visits all of them again and again: a fifth of the client's CPU, and pauses of the whole event loop. Nearly nothing in a rollout is
cyclic garbage (what an episode leaves is freed by reference counts), so a round every few seconds is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

SECONDS = 20.0


@contextlib.asynccontextmanager
async def paced_garbage(seconds: float = SECONDS) -> AsyncIterator[None]:
    """Within it the collector runs once in `seconds`, and leaves alone what was there before (modules, tokenizers).

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
    while True:
        await asyncio.sleep(seconds)
        gc.collect()
