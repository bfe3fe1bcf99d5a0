"""Call overridden hooks of `TrainableAgentMixin`, and check what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from toolroll.rollout.errors import EnvironmentFailure, ToolrollError, message_of
from toolroll.rollout.runtime.threads import Threads

T = TypeVar("T")

_FIELDS = ("observation", "messages", "reward", "done", "info", "tools")


async def run_hook(hook: Callable[..., Any], *args: Any) -> Any:
    """Return what `hook` returns. A hook that is not async may block: it gets a thread."""
    if inspect.iscoroutinefunction(hook):
        return await hook(*args)
    return await Threads(1).run_in_thread(hook, *args)


@contextmanager
def reading(hook: str) -> Iterator[None]:
    """If reading the return value of `hook` raises an exception, raise an `EnvironmentFailure` that
    names the hook. Errors of toolroll are raised unchanged.
    """
    try:
        yield
    except ToolrollError:
        raise
    except Exception as error:
        raise EnvironmentFailure(
            f"what {hook} returned cannot be read: {type(error).__name__}: {message_of(error)}"
        ) from error


def hook_value(hook: str, returned: T, *, depth: int = 0) -> T:
    """Return `returned`, which the overridden hook `hook` returned.

    Raise `EnvironmentFailure` if it is a coroutine, or contains one within `depth` levels of dicts,
    lists and fields such as `info`. The coroutine is closed, so that Python does not warn about it.
    """
    awaits = [value for value in _values(returned, depth) if inspect.isawaitable(value)]
    for value in awaits:
        if inspect.iscoroutine(value):
            value.close()
    if not awaits:
        return returned
    name = awaits[0].__qualname__ if inspect.iscoroutine(awaits[0]) else type(awaits[0]).__name__
    kind = "a coroutine" if awaits[0] is returned else "an object that contains a coroutine"
    raise EnvironmentFailure(
        f"{hook} returned {kind} ({name}) instead of a value: an `await` is missing, or the hook "
        "must not be async"
    )


def _values(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth == 0 or inspect.isawaitable(value):
        return
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    else:
        parts = [getattr(value, name, None) for name in _FIELDS]
    for part in parts:
        yield from _values(part, depth - 1)
