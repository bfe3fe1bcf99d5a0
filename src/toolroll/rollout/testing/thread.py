"""Run the embedded engine in a thread, for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from toolroll.rollout.testing.engine import EmbeddedEngine


@contextmanager
def serve_in_thread(engine: EmbeddedEngine) -> Iterator[EmbeddedEngine]:
    """Serve `engine` while the context is open, on an event loop in a separate thread.

    Any thread may read `engine.url` and `engine.log`. Do not call the engine's methods from other
    threads. Use HTTP instead (`/abort_request`). The policy is called in the engine's thread.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="embedded-engine", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
        try:
            yield engine
        finally:
            asyncio.run_coroutine_threadsafe(engine.__aexit__(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
