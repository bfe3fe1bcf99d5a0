"""`run`: does what `asyncio.run` does, but on uvloop's event loop if uvloop is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in a new event loop and return its result."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if find_spec("uvloop") is None:  # uvloop is an optional dependency
        return None
    import uvloop

    return uvloop.new_event_loop
