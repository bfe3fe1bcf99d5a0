"""`Callback`: code of your own that a `Runner` calls after each episode and at the end of a run.

Invariants: an episode is stored before any callback sees it; an exception in a callback is logged
and changes neither the run nor the other callbacks.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Sequence
from typing import Literal

from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.types import Episode

logger = logging.getLogger(__name__)


class Callback:
    """Override one method or both; each may be a coroutine function.

    The event loop that plays the episodes runs them: a callback that blocks delays every episode.

        class PrintReward(Callback):
            def on_episode(self, episode: Episode, summary: Summary) -> None:
                sys.stdout.write(f"{episode.task_id}: {episode.result.reward}\\n")

        Runner(factory, make_agent, settings, callbacks=[PrintReward()])
    """

    def on_episode(self, episode: Episode, summary: Summary) -> Awaitable[None] | None:
        """Handle one finished episode, aborted ones included.

        `summary` covers the episodes of this `Runner.run`, this one included.
        """

    def on_summary(self, summary: Summary) -> Awaitable[None] | None:
        """Handle the end of a run, also if an error or a cancellation ended it."""


class Callbacks:
    """The callbacks of one run, with the summary that they are given."""

    def __init__(self, callbacks: Sequence[Callback], env: str) -> None:
        self._callbacks = callbacks
        self._summary = Summary(env)

    async def on_episode(self, episode: Episode) -> None:
        """Call every callback with `episode`."""
        if self._callbacks:
            self._summary.add(episode)
            await self._call("on_episode", episode)

    async def on_summary(self) -> None:
        """Call every callback with the summary."""
        if self._callbacks:
            await self._call("on_summary", None)

    async def _call(
        self, method: Literal["on_episode", "on_summary"], episode: Episode | None
    ) -> None:
        async def call(callback: Callback) -> None:
            made = (
                callback.on_summary(self._summary)
                if episode is None
                else callback.on_episode(episode, self._summary)
            )
            if inspect.isawaitable(made):
                await made

        # gather returns an exception of a callback, and raises a cancellation of the run
        ends = await asyncio.gather(*map(call, self._callbacks), return_exceptions=True)
        for callback, end in zip(self._callbacks, ends, strict=True):
            if end is not None:
                logger.error(
                    "%s.%s failed; the run continues and no episode is lost",
                    type(callback).__name__,
                    method,
                    exc_info=end,
                )
