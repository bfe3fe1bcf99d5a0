"""`Executor`: threads for blocking environments and users, where no `ServedModel` brings its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class RunsOffLoop(Protocol):
    """What an agent without tokens needs of a `ServedModel`."""

    def off_loop(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Awaitable[T]:
        """Run blocking `function` away from the event loop."""
        ...


class Executor:
    """At most `threads` blocking calls at once. An async context manager."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="toolroll")

    async def off_loop(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run blocking `function` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kwargs))

    async def __aenter__(self) -> Executor:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
