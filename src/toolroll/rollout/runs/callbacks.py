"""`Callback`: your own code that a `Runner` calls after each episode and at the end of a run.

Invariants: an episode is stored before any callback sees it. An exception in a callback is logged,
and affects neither the run nor other callbacks.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.runtime.foreign import guarded

logger = logging.getLogger(__name__)


class Callback:
    """The base class of callbacks. Override one method or both. Each may be a coroutine function.

    Callbacks run in the event loop that plays the episodes, so a callback that blocks delays every
    episode.

        class PrintReward(Callback):
            def on_episode(self, episode: Episode, summary: Summary) -> None:
                sys.stdout.write(f"{episode.task_id}: {episode.result.reward}\\n")

        Runner(factory, make_agent, settings, callbacks=[PrintReward()])
    """

    def on_episode(self, episode: Episode, summary: Summary) -> Awaitable[None] | None:
        """Handle an episode that has finished. It may be an aborted one.

        `summary` covers the episodes of this `Runner.run` so far, including this one.
        """

    def on_summary(self, summary: Summary) -> Awaitable[None] | None:
        """Handle the end of a run, even if an error or a cancellation ended it."""


class Callbacks:
    """The callbacks of one run, and their summary.

    Callbacks are called for one episode at a time, in the order in which the episodes were stored.
    So the summary that a callback gets with an episode covers no later episode.
    """

    def __init__(self, callbacks: Sequence[Callback], env: str) -> None:
        self._callbacks = callbacks
        self._summary = Summary(env)
        self._turn = asyncio.Lock()

    async def on_episode(self, episode: Episode) -> None:
        """Call every callback with `episode`."""
        if not self._callbacks:
            return
        async with self._turn:
            self._summary.add(episode)
            for callback in self._callbacks:
                await _guarded(callback, partial(callback.on_episode, episode, self._summary))

    async def on_summary(self) -> None:
        """Call every callback with the summary."""
        for callback in self._callbacks:
            await _guarded(callback, partial(callback.on_summary, self._summary))


async def _guarded(callback: Callback, call: Callable[[], Awaitable[None] | None]) -> None:
    try:
        with guarded():
            result = call()
            if inspect.isawaitable(result):
                await result
    except Exception:  # the border to a user's code: a callback must not end the run
        logger.exception(
            "%s failed; the run continues and no episode is lost", type(callback).__name__
        )
