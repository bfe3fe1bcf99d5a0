"""`RayWorker`: a process of a Ray cluster that holds one object, and calls its methods.

Invariants:

- If the process dies, Ray restarts it, and its calls raise `WorkerDiedError`. If its event loop
  does not respond for `_STALL` seconds, for example because code holds the GIL, it is killed.
- If a call is cancelled, it is cancelled in the process too, and has ended when the caller goes on,
  unless that takes more than `_GRACE` seconds.
- An error of the object arrives as one of toolroll's, with its text. Other objects that it refers
  to stay in the process, because it may be impossible to pickle or unpickle them.

Ray blocks SIGINT in its processes, so Ctrl-C reaches only the caller. A program that an environment
starts with `subprocess` inherits this, and ends only by another signal. Unblocking SIGINT would end
the process at Ctrl-C: Ray runs an actor outside the main thread, where no handler can be set.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from toolroll.evaluation.worker_pool import WorkerDiedError, WorkerStalledError
from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.runs.runner import RunStoppedError
from toolroll.rollout.runtime.foreign import retrieve
from toolroll.rollout.runtime.jsonable import plain

logger = logging.getLogger(__name__)

Open = Callable[[AsyncExitStack], Awaitable[Any]]
"""A function that returns the object of a process, which calls it first. The exit stack closes the
object. It is pickled, so it must be a module-level function, or a `functools.partial` of one.
"""

_STALL, _BEAT = 300.0, 1.0  # seconds: without a response, and between two requests for one
_GRACE = 5.0
_CALLS = 1 << 16  # at once, at most: the callers limit them


class _Worker:
    """The class of the Ray actors."""

    def __init__(self, open_: Open) -> None:
        self._open = open_
        self._stack = AsyncExitStack()
        self._opening: asyncio.Task[Any] | None = None

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call `method` of the object. The first call opens the object."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open(self._stack))
        try:
            opened = await asyncio.shield(self._opening)
            return await getattr(opened, method)(*args, **options)
        except Exception as error:  # noqa: BLE001 - it is raised in the caller's process
            raise _sendable(error) from None

    async def respond(self) -> None:
        """Do nothing, which shows that the event loop is not blocked."""

    async def close(self) -> None:
        """Close the object."""
        if self._opening is not None:
            self._opening.cancel()
        await self._stack.aclose()


def _sendable(error: Exception) -> Exception:
    if isinstance(error, RunStoppedError):
        return RunStoppedError(str(error), plain(error.failure))
    if isinstance(error, UsageError):
        return UsageError(str(error))
    return RolloutError(
        str(error) if isinstance(error, RolloutError) else f"a worker failed: {error!r}"
    )


class RayWorker:
    """The caller's handle of a process. Raise `UsageError` if Ray is not installed."""

    def __init__(self, open_: Open) -> None:
        self._ray = import_ray()
        actor = self._ray.remote(_Worker).options(
            max_concurrency=_CALLS, max_restarts=-1, num_cpus=0.01, scheduling_strategy="SPREAD"
        )
        self._actor = actor.remote(open_)
        self._calls = 0
        self._stalled = False
        self._watching: asyncio.Task[None] | None = None

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call `method` of the object. Raise `WorkerDiedError` if the process dies."""
        reference = self._actor.call.remote(method, *args, **options)
        future = asyncio.ensure_future(reference)
        future.add_done_callback(retrieve)
        self._calls += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._ray.cancel(reference)
            await asyncio.wait([future], timeout=_GRACE)
            raise
        except self._ray.exceptions.RayActorError as error:
            kind = WorkerStalledError if self._stalled else WorkerDiedError
            raise kind(type(error).__name__) from error
        except self._ray.exceptions.TaskCancelledError as error:  # by code in the process
            raise RolloutError("the call was cancelled in its process") from error
        except self._ray.exceptions.RayTaskError as error:
            raise _sendable(error.cause) from error
        finally:
            self._calls -= 1

    async def close(self) -> None:
        """Close the object and end the process."""
        if self._watching is not None:
            self._watching.cancel()
        closing = asyncio.ensure_future(self._actor.close.remote())
        closing.add_done_callback(retrieve)
        await asyncio.wait([closing], timeout=_GRACE)
        self._ray.kill(self._actor)

    async def _watch(self) -> None:
        """Kill the process if it has calls and does not respond. Its start may take any time."""
        limit = None
        while self._calls:
            try:
                async with asyncio.timeout(limit):
                    await self._actor.respond.remote()
                limit, self._stalled = _STALL, False
            except TimeoutError:
                logger.warning("a worker does not respond, and is killed")
                self._stalled = True
                self._ray.kill(self._actor, no_restart=False)
                limit = None
            except self._ray.exceptions.RayActorError:
                limit = None
            await asyncio.sleep(_BEAT)


@asynccontextmanager
async def connected(address: str, processes: int) -> AsyncIterator[None]:
    """Connect this process to the Ray cluster at `address`, unless it is connected to one. "local"
    starts a cluster on this machine for `processes` workers, which ends with the context.

    Raise `UsageError` if Ray is not installed or the cluster cannot be reached.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {}
    if address == "local":
        options = {"include_dashboard": False, "num_cpus": processes}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send statistics
    # In a thread, because Ray would replace the handler of SIGTERM in the main thread. Its log
    # messages say this, and where its dashboard is.
    connecting = asyncio.ensure_future(
        asyncio.to_thread(ray.init, address=address, logging_level="ERROR", **options)
    )
    try:
        try:
            await asyncio.shield(connecting)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(f"cannot connect to Ray at {address}: {error}") from error
        _restore_handler()
        yield
    finally:
        await asyncio.wait([connecting])
        await asyncio.to_thread(ray.shutdown)


def _restore_handler() -> None:
    """Make the present handler of SIGTERM the only one. Ray's core also prints a C stack."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def import_ray() -> Any:
    """Import and return Ray. Raise `UsageError` if it is not installed."""
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        raise UsageError(
            "several processes need Ray, the extra `ray` of toolroll: pip install 'ray>=2.40'"
        ) from error
    return ray
