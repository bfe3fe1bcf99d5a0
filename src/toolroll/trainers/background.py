"""`Background`: an event loop in a separate thread, for trainers that call synchronous functions.

Invariant: `run` ends only after its coroutine has ended. An interrupt (Ctrl-C) cancels the
coroutine, so that its episodes close their environments before `run` ends. Only a second interrupt
ends `run` at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from toolroll.rollout.runtime.threads import LoopThreads

T = TypeVar("T")


class Background:
    """Runs coroutines for threads that have no event loop. All coroutines run in one thread named
    `name`, which the first of them starts.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` to its end and return its result.

        If the waiting thread is interrupted, cancel the coroutine and wait until it ends. A second
        interrupt stops the wait.
        """
        loop, ended = self._started(), threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: ended.set())

        loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            if not tasks[0].cancelled():
                tasks[0].exception()  # retrieved, so that asyncio does not log it
            raise
        return tasks[0].result()

    def close(self) -> None:
        """End the thread. A later `run` starts another thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(LoopThreads())
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop
