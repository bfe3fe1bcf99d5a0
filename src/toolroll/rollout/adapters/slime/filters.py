"""Filters that select the groups of samples to train on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def leaves(group: Iterable[Any]) -> Iterator[Any]:
    """Yield the samples of a group, including those in the list of a forked episode."""
    for item in group:
        if isinstance(item, list):
            yield from leaves(item)
        else:
            yield item


def has_aborted(group: Iterable[Any]) -> bool:
    """Return True if an episode of the group was aborted or has no reward."""
    return any(sample.reward is None or sample.status.name == "ABORTED" for sample in leaves(group))


def keep_group(args: Any, samples: Sequence[Any], **unused: Any) -> bool:
    """Return True if all episodes of the group have rewards, and the rewards differ. This function
    is for `--dynamic-sampling-filter-path`.

    slime's normalization fails if a reward is missing. If all rewards are equal, all advantages are
    0, so the group trains nothing.
    """
    if has_aborted(samples):
        return False
    rewards = {sample.get_reward_value(args) for sample in leaves(samples)}
    return len(rewards) > 1
