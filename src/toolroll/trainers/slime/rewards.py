"""Normalize rewards within groups, for `--custom-reward-post-process-path`.

slime itself finds the groups by counting samples. A forked episode has several samples, so the
count is wrong. slime then subtracts the mean of the whole batch, in which the forked episode counts
several times. This module finds the groups by `group_index`, and counts each episode once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from toolroll.rollout.errors import UsageError
from toolroll.trainers.slime.settings import attribute

_DIVIDED = ("grpo", "gspo", "cispo")
_CENTERED = (*_DIVIDED, "reinforce_plus_plus_baseline")


def normalizes_groups(args: Any) -> bool:
    """Return True if slime's estimator subtracts the mean reward of each group."""
    estimator = attribute(args, "advantage_estimator")
    return estimator in _CENTERED and attribute(args, "rewards_normalization", True)


def normalize_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the raw and the normalized reward of each sample, by slime's formula. For
    `--custom-reward-post-process-path`.

    Samples with the same `group_index` form a group. Samples with the same `rollout_id` form an
    episode, and all get the same value. If slime's estimator does not normalize within groups,
    return the raw rewards twice. Otherwise, raise `UsageError` for a sample without a reward or
    `group_index`.
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    if not normalizes_groups(args):
        return raw, raw
    groups: dict[int, dict[Hashable, float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        _check(sample, reward)
        groups.setdefault(sample.group_index, {}).setdefault(_episode(sample), float(reward))
    divided = args.advantage_estimator in _DIVIDED and attribute(
        args, "grpo_std_normalization", True
    )
    values = {index: _normalized(group, divided=divided) for index, group in groups.items()}
    return raw, [values[sample.group_index][_episode(sample)] for sample in samples]


def _check(sample: Any, reward: Any) -> None:
    if sample.group_index is None:
        raise UsageError(
            f"sample {sample.index} has no group_index: set it, because rewards are normalized "
            "within groups"
        )
    if reward is None:
        raise UsageError(
            f"sample {sample.index} has no reward: drop such groups with "
            "--dynamic-sampling-filter-path toolroll.trainers.slime.keep_group"
        )


def _episode(sample: Any) -> Hashable:
    """Return a key that only the samples of one episode share."""
    if sample.rollout_id is not None:
        return "rollout_id", sample.rollout_id
    return ("index", sample.index) if sample.index is not None else ("sample", id(sample))


def _normalized(group: dict[Hashable, float], *, divided: bool) -> dict[Hashable, float]:
    rewards = np.array(list(group.values()), dtype=np.float64)
    values = rewards - rewards.mean()
    if divided and len(values) > 1:  # one value has no deviation
        values = values / (values.std(ddof=1) + 1e-6)
    return dict(zip(group, values.tolist(), strict=True))
