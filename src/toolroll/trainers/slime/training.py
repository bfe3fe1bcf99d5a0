"""`generate_rollout`: plays a whole rollout or evaluation, for `--rollout-function-path` and
`--eval-function-path`.

Invariants: a group is trained on only if all of its episodes have rewards. A group with an aborted
episode is replaced with another group; too many such groups in a row end the rollout with an error.
When a call returns, raises an error or is interrupted (Ctrl-C), no episode and no request keeps
running; with `--partial-rollout`, episodes stay parked. An evaluation's mean does not include
aborted episodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.trainers.background import Background
from toolroll.trainers.episodes import gather
from toolroll.trainers.slime.evaluation import evaluate
from toolroll.trainers.slime.generation import aclose, player, with_sample_hooks
from toolroll.trainers.slime.player import Player
from toolroll.trainers.slime.ray_player import RayPlayer
from toolroll.trainers.slime.rewards import normalizes_groups
from toolroll.trainers.slime.samples import (
    EpisodeSamples,
    failure,
    has_aborted,
    is_parked,
    leaves,
    rollout_metrics,
)
from toolroll.trainers.slime.settings import (
    attribute,
    check_supported,
    collects_partial,
    masks_off_policy,
    parks,
    seeded,
)

logger = logging.getLogger(__name__)

_ABORT_INTERVAL = 1.0
"""Seconds between two aborts of all requests. A request may start during an abort."""
_MOST_ABORTED = 64
"""A rollout ends after this many aborted groups in a row."""
_MOST_CONTINUED = 100
"""How often one rollout plays on an aborted group. A rollout whose engine aborts every request
must end.
"""


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, *, evaluation: bool = False
) -> Any:
    """Return slime's `RolloutFnTrainOutput`, or `RolloutFnEvalOutput` if `evaluation` is True. Call
    this function from a thread without an event loop.

    Raise `UsageError` if the settings are not valid, and `RolloutError` if too many groups in a row
    had an aborted episode.
    """
    outputs = import_module("slime.rollout.base_types")
    if evaluation:
        data, metrics = _background().run(evaluate(args, rollout_id))
        return outputs.RolloutFnEvalOutput(data=data, metrics=metrics)
    groups, metrics = _background().run(collect(args, rollout_id, data_source))
    return outputs.RolloutFnTrainOutput(samples=groups, metrics=metrics)


def close_rollout() -> None:
    """Close the connections that `generate_rollout` keeps open from one rollout to the next."""
    _background().run(aclose())


@cache
def _background() -> Background:
    """Return the event loop of all rollouts. They share one loop, because the connections stay open
    between rollouts and work only in the loop that opened them.
    """
    return Background("toolroll-slime")


def train_sampling_params(args: Any) -> dict[str, Any]:
    """Return the sampling parameters that slime's own loop uses."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": attribute(args, "rollout_stop"),
        "stop_token_ids": attribute(args, "rollout_stop_token_ids"),
    }


async def collect(
    args: Any, rollout_id: int, data_source: Any
) -> tuple[list[list[Any]], dict[str, float]]:
    """Play groups from `data_source`. Return `rollout_batch_size` groups to train on, and metrics.
    A group is a list of samples. The samples of a forked episode follow each other in it.
    """
    playing = player(args)
    check_supported(args, evaluation=False)
    if attribute(args, "group_rm", False):
        raise UsageError(
            "--group-rm: generate_rollout takes rewards only from the environment; to use a group "
            "reward model, set --custom-generate-function-path instead of --rollout-function-path"
        )
    batch = _Batch(args, playing, data_source, rollout_id)
    try:
        await batch.fill()
        await batch.park()
    finally:
        await batch.stop()
    groups = sorted(batch.taken.kept, key=_place)
    forked = any(isinstance(item, list) for group in groups for item in group)
    own_rewards = attribute(args, "custom_reward_post_process_path")
    if forked and normalizes_groups(args) and not own_rewards:
        _warn_of_forks()
    if filter_samples := _function(args, "rollout_sample_filter_path"):
        filter_samples(args, groups)
    if process := _function(args, "rollout_all_samples_process_path"):
        process(args, sorted(batch.taken.played, key=_place), data_source)
    dropped = {
        f"rollout/dynamic_filter/drop_{reason}": float(count)
        for reason, count in batch.taken.dropped.items()
    }
    metrics = rollout_metrics(batch.taken.played) | await playing.parked_metrics()
    # slime flattens a batch by the type of its first item, so no item may be a list.
    return [list(leaves(group)) for group in groups], metrics | dropped


def _place(group: Sequence[Any]) -> int:
    """Return the index of the group's first sample."""
    index: int | None = next(leaves(group)).index
    return index or 0


@cache
def _warn_of_forks() -> None:
    """Warn once that slime normalizes the rewards of forked episodes over the whole batch."""
    logger.warning(
        "an episode forked into several samples, so slime cannot find the groups and normalizes "
        "rewards over the whole batch: set --custom-reward-post-process-path "
        "toolroll.trainers.slime.normalize_rewards"
    )


class _Taken:
    """The finished groups of one rollout, and the rules by which they are trained on. In a group, a
    forked episode is a list of samples.

    `kept` are the groups to train on, and `played` all finished groups. `dropped` counts the groups
    that are not trained on, by reason: "aborted", or the dynamic filter's reason. After
    `_MOST_ABORTED` aborted groups in a row, `add` raises `RolloutError`.
    """

    def __init__(self, args: Any) -> None:
        self.kept: list[list[Any]] = []
        self.played: list[list[Any]] = []
        self.dropped: Counter[str] = Counter()
        self._args = args
        self._wanted: int = args.rollout_batch_size
        self._filter = _function(args, "dynamic_sampling_filter_path")
        self._failures = 0

    @property
    def missing(self) -> int:
        """The number of groups that are still to be kept."""
        return self._wanted - len(self.kept)

    def add(self, group: list[Any], pending: int) -> None:
        """Keep or drop a finished group. `pending`: the number of groups that are still played."""
        self.played.append(group)
        reason = self._reason_to_drop(group, pending)
        if reason is None:
            if self.missing:
                self.kept.append(group)
            return
        self.dropped[reason] += 1
        if reason != "aborted":
            return
        self._failures += 1
        if self._failures >= _MOST_ABORTED:
            failed = [sample for sample in leaves(group) if sample.reward is None]
            raise RolloutError(
                f"{self._failures} groups in a row could not be graded; the last episode: "
                f"{failure(failed[-1])}"
            )

    def _reason_to_drop(self, group: list[Any], pending: int) -> str | None:
        if has_aborted(group):
            return "aborted"
        self._failures = 0
        if self._filter is None:
            return None
        verdict = self._filter(self._args, group)
        if isinstance(verdict, bool):
            return None if verdict else "filter"
        insufficient = pending < self.missing
        if verdict.keep or (attribute(verdict, "keep_when_insufficient", False) and insufficient):
            return None
        return str(verdict.reason or "filter")


class _Batch:
    """Plays the groups of one rollout until enough of them are `taken`. `rollout_id` is noted in
    samples that are put back and have tokens, as slime does.
    """

    def __init__(
        self, args: Any, playing: Player | RayPlayer, data_source: Any, rollout_id: int
    ) -> None:
        self.taken = _Taken(args)
        self._continued: Counter[int] = Counter()
        self._args = args
        self._playing = playing
        self._source = data_source
        self._rollout_id = rollout_id
        self._params = train_sampling_params(args)
        self._pending: dict[asyncio.Task[list[Any]], list[Any]] = {}
        self._parks = parks(args, playing.settings)
        self._puts_back = self._parks and collects_partial(args)
        self._stopped = False

    async def fill(self) -> None:
        """Play groups until enough of them can be trained on. A group with parked episodes, whose
        requests the engine aborted, is put back and so played on, at most `_MOST_CONTINUED` times.
        """
        size = attribute(self._args, "over_sampling_batch_size", self._args.rollout_batch_size)
        while self.taken.missing:
            while len(self._pending) < self.taken.missing:
                self._begin(self._source.get_samples(size))
            done, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not self.taken.missing and collects_partial(self._args):
                    break  # the others are put back
                self._pending.pop(task)
                await self._take(task.result())

    async def park(self) -> None:
        """If episodes are parked after an abort, abort their requests until all of them are parked
        or over, and return their groups to the data source.
        """
        self._stopped = self._puts_back
        while self._stopped and self._pending:
            await self._playing.abort()
            done, _ = await asyncio.wait(
                self._pending, timeout=_ABORT_INTERVAL, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                group = task.result()
                del self._pending[task]
                self._put_back(group)

    async def stop(self) -> None:
        """Cancel the running episodes, which aborts their requests at the engine. If
        `--partial-rollout` is set, return the groups of these episodes to the data source, so that
        a later rollout plays them from the beginning.
        """
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        if self._pending and collects_partial(self._args):
            self._source.add_samples(list(self._pending.values()))
        self._pending.clear()

    def _put_back(self, group: list[Any]) -> None:
        for sample in leaves(group):
            if sample.response:
                sample.metadata.setdefault("start_rollout_id", self._rollout_id)
        self._source.add_samples([group])

    def _begin(self, groups: Sequence[list[Any]]) -> None:
        if not groups:
            raise UsageError("the data source has no more samples: add tasks to its file")
        for group in groups:
            self._pending[asyncio.create_task(self._play(group))] = group

    async def _play(self, group: Sequence[Any]) -> list[Any]:
        played: list[Any] = []

        async def play(position: int, item: Any) -> Any:
            sample = item[0] if isinstance(item, list) else item
            mask = masks_off_policy(self._args)
            if sample.status.name in ("COMPLETED", "TRUNCATED"):  # of a group that was put back
                for earlier in leaves([item]) if mask else ():
                    earlier.loss_mask = [0] * earlier.response_length
                return item
            params = seeded(self._args, self._params, position)
            async with self._playing.limit:
                if self._stopped:
                    return item
                episode = await self._playing.play(
                    sample, params, stopped=lambda: self._stopped, park=self._parks, mask=mask
                )
            played.extend(episode)
            result = episode[0] if len(episode) == 1 else EpisodeSamples(episode)
            return await with_sample_hooks(self._args, result, evaluation=False)

        try:
            return await gather(play(*numbered) for numbered in enumerate(group))
        except BaseException:  # the original group is put back, without the sessions
            await self._playing.close_parked(played)
            raise

    async def _take(self, group: list[Any]) -> None:
        if self._puts_back and any(map(is_parked, leaves(group))):
            self._continued[_place(group)] += 1
            if self._continued[_place(group)] <= _MOST_CONTINUED:
                self._put_back(group)
                return
        await self._playing.close_parked(leaves(group))
        self.taken.add(group, len(self._pending))


def _function(args: Any, option: str) -> Callable[..., Any] | None:
    """Return the function whose path is in slime's argument `option`."""
    path = attribute(args, option)
    return resolve_name(path) if path else None
