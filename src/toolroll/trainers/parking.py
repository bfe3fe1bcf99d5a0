"""`ParkedEpisodes`: episodes that wait after an abort, until the trainer continues their samples.

A parked episode keeps its environment, its conversation and the tokens of the aborted turn. The
trainer gets the tokens so far. When it passes the sample again, the turn is resumed. An episode
whose turn cannot be resumed (`engine/resume.py`) does not park: it ends, and starts again.

Invariants: an episode that is dropped, or that is parked when its event loop ends, closes its
environment. The tokens of an episode are the same as without the abort, only their weight versions
differ.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from toolroll.rollout.engine import PARKING
from toolroll.rollout.environment import Environment
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.runtime.time_limit import not_counted
from toolroll.rollout.session.session import CONTEXT
from toolroll.rollout.types import (
    Completion,
    GenerateRequest,
    StopReason,
    Trajectory,
    Turn,
    WeightVersion,
)

logger = logging.getLogger(__name__)


class ParkableEpisode:
    """One episode that may park. It runs in a task of its own, because it outlives the trainer's
    call. Only the requests of the session `session_id` park. `stopped` is called before each turn.
    """

    def __init__(self, session_id: str, stopped: Callable[[], bool]) -> None:
        self.session_id = session_id
        self._stopped = stopped
        self.resumes = 0
        self.seconds = 0.0
        """How long the episode was parked."""
        self.task: asyncio.Task[InteractionResult] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.parked = asyncio.Event()
        self._going = asyncio.Event()
        self._can_wait = True
        self._turns: list[tuple[int, Completion]] = []  # each with the token at which it starts
        self._aborted: tuple[GenerateRequest, Completion] | None = None
        self._off_policy = 0, 0

    def start(self, episode: Coroutine[Any, Any, InteractionResult]) -> None:
        """Start `episode` in a task whose requests park here."""

        async def run() -> InteractionResult:
            PARKING.set(self)
            return await episode

        self.task = asyncio.create_task(run())

    def begin(self, env: Environment) -> None:
        """Start an attempt at the episode, with a new environment."""
        self._can_wait = getattr(env, "can_wait", True)
        self._turns.clear()
        self._aborted, self._off_policy = None, (0, 0)

    def resume(self, stopped: Callable[[], bool], *, mask: bool) -> None:
        """Resume the parked episode. If `mask` is True, the tokens so far are not trained."""
        if mask and self._aborted is not None:
            self._off_policy = len(self._turns), len(self._aborted[1].output_ids)
        self._stopped = stopped
        self.resumes += 1
        self.parked.clear()
        self._going.set()
        self._going = asyncio.Event()

    # --- `Parking`: called by the episode's own requests ------------------------------------------

    def stopped(self) -> bool:
        """Return True while the trainer lets no turn start."""
        return self._stopped()

    async def wait(self, request: GenerateRequest, turn: Completion) -> bool:
        """Park, and wait for `resume`. Return False if this episode cannot wait."""
        if not self._can_wait or request.session_id != self.session_id:
            return False
        self._aborted = request, turn
        began, going = perf_counter(), self._going
        self.parked.set()
        try:
            with not_counted():
                await going.wait()
        finally:
            self.seconds += perf_counter() - began
        return True

    def sampled(self, request: GenerateRequest, turn: Completion) -> None:
        """Keep the tokens of a complete turn, for `so_far`."""
        if request.session_id == self.session_id:
            self._turns.append((len(request.input_ids), turn))

    # --- its tokens -------------------------------------------------------------------------------

    @property
    def versions(self) -> set[str]:
        """The weight versions of the tokens so far."""
        turns = [turn for _, turn in self._turns] + ([self._aborted[1]] if self._aborted else [])
        return {span.version for turn in turns for span in turn.weight_versions}

    def so_far(self, decode: Callable[[Sequence[int]], str]) -> InteractionResult:
        """Return the parked episode as an aborted one, with the sequence that will be continued."""
        assert self._aborted is not None
        request, last = self._aborted
        prompt = request.input_ids
        ids = np.concatenate([prompt, last.output_ids])
        logprobs = np.full(len(ids), np.nan, dtype=np.float32)
        turns: list[Turn] = []
        for start, part in (*self._turns, (len(prompt), last)):
            stop = start + len(part.output_ids)
            # After a fork, the turns of earlier sequences are not at their position.
            if start == stop or not np.array_equal(ids[start:stop], part.output_ids):
                continue
            if part.logprobs is not None:
                logprobs[start:stop] = part.logprobs
            versions = (
                WeightVersion(span.version, span.start + start, span.stop + start)
                for span in part.weight_versions
            )
            turns.append(Turn(start, stop, "abort", weight_versions=tuple(versions)))
        first = turns[0].start if turns else len(ids)
        mask = np.zeros(len(ids), dtype=np.int32)
        result = InteractionResult.of(
            [Trajectory(ids, mask, logprobs, tuple(turns), first, media=tuple(request.images))],
            prompt="",
            reward=None,
            messages=[],
            info={},
            stop_reason=StopReason.ENGINE_ABORT,
            metrics={"parked": 1, "resumes": self.resumes, "parked_seconds": self.seconds},
        )
        return replace(result, response=decode(ids[first:].tolist()))

    def result(self) -> InteractionResult:
        """Return the result of the episode, which is over. It has mask 0 for what `resume` masks,
        and its seconds are without the parked time.
        """
        assert self.task is not None
        result = self.task.result()
        result.metrics["seconds"] = result.metrics.get("seconds", 0.0) - self.seconds
        result.metrics.update(resumes=self.resumes, parked_seconds=self.seconds)
        return replace(result, trajectories=masked(result.trajectories, *self._off_policy))


def masked(trajectories: Sequence[Trajectory], turns: int, tokens: int) -> tuple[Trajectory, ...]:
    """Return `trajectories` with mask 0 for the first `turns` turns of the episode, and for the
    first `tokens` tokens of the turn after them.
    """
    turns_left, changed = turns, list[Trajectory]()
    for trajectory in trajectories:
        mask = trajectory.loss_mask.copy()
        for turn in trajectory.turns:
            if turn.excluded == CONTEXT:
                continue  # an earlier sequence has this turn
            if turns_left >= 0:
                mask[turn.start : turn.stop if turns_left else turn.start + tokens] = 0
            turns_left -= 1
        changed.append(replace(trajectory, loss_mask=mask))
    return tuple(changed)


class ParkedEpisodes:
    """The parked episodes of one event loop, by a key that only one sample has.

    `most`: if more episodes are parked, the oldest ones are dropped. `seconds`: an episode that is
    parked for longer is dropped. `versions`: an episode with tokens of this many weight versions is
    dropped instead of resumed.
    """

    def __init__(self, *, most: int, seconds: float, versions: int | None) -> None:
        self.dropped: Counter[str] = Counter()
        """The number of dropped episodes, by the setting whose limit was reached."""
        self._most = most
        self._seconds = seconds
        self._versions = versions
        self._parked: dict[Hashable, ParkableEpisode] = {}
        self._ending: set[asyncio.Task[InteractionResult]] = set()

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return the number of parked episodes, and of dropped ones by limit."""
        dropped = {
            f"{prefix}parked_dropped/{limit}": count for limit, count in self.dropped.items()
        }
        return {f"{prefix}parked": float(len(self._parked)), **dropped}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._parked

    async def close(self, keys: Iterable[Hashable]) -> None:
        """Close the episodes that are parked under `keys`, also if this call is cancelled."""
        closing = [self._expire(key, "") for key in keys if key in self._parked]
        try:
            await _wait(closing)
        except asyncio.CancelledError:
            await _wait(closing)
            raise

    def take(self, key: Hashable) -> ParkableEpisode | None:
        """Remove the episode that is parked under `key`, and return it, or None."""
        episode = self._parked.pop(key, None)
        if episode is None:
            return None
        if episode.timer is not None:
            episode.timer.cancel()
        if self._versions is not None and len(episode.versions) >= self._versions:
            self._drop(episode, "max_weight_versions")
            return None
        return episode

    async def until_parked(self, key: Hashable, episode: ParkableEpisode) -> bool:
        """Wait until the running `episode` is over or parks. Return True if it is parked.

        If this call is cancelled, cancel the episode and wait until its environment is closed.
        """
        assert episode.task is not None
        parked = asyncio.ensure_future(episode.parked.wait())
        try:
            await asyncio.wait([episode.task, parked], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            episode.task.cancel()
            await asyncio.wait([episode.task])
            raise
        finally:
            parked.cancel()
        if episode.task.done():
            return False
        if key in self._parked:  # the sample was played twice at once
            self._expire(key, "")
        self._parked[key] = episode
        episode.timer = asyncio.get_running_loop().call_later(self._seconds, self._expire, key)
        while len(self._parked) > self._most:
            self._expire(next(iter(self._parked)), "max_parked")
        return True

    async def aclose(self) -> None:
        """Close all parked episodes."""
        for key in list(self._parked):
            self._expire(key, "")
        await _wait(self._ending)

    def _expire(
        self, key: Hashable, limit: str = "parked_timeout"
    ) -> asyncio.Task[InteractionResult]:
        episode = self._parked.pop(key)
        if episode.timer is not None:
            episode.timer.cancel()
        return self._drop(episode, limit)

    def _drop(self, episode: ParkableEpisode, limit: str) -> asyncio.Task[InteractionResult]:
        assert episode.task is not None
        if limit:
            self.dropped[limit] += 1
            logger.warning("parked episode %s was dropped: see %s", episode.session_id, limit)
        self._ending.add(episode.task)
        episode.task.add_done_callback(self._ending.discard)
        episode.task.cancel()
        return episode.task


async def _wait(tasks: Collection[asyncio.Task[InteractionResult]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
