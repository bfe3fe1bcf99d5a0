"""Filters that select the groups of samples to train on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def leaves(group: Iterable[Any]) -> Iterator[Any]:
    """Yield the samples of a group. The samples of a forked episode are flattened."""
    for item in group:
        if isinstance(item, list):
            yield from leaves(item)
        else:
            yield item


def has_aborted(group: Iterable[Any]) -> bool:
    """Return True if an episode of the group has no reward."""
    return any(sample.reward is None or sample.status.name == "ABORTED" for sample in leaves(group))


def keep_group(args: Any, samples: Sequence[Any], **unused: Any) -> bool:
    """Keep a group if all its episodes were graded and their rewards differ. This is for
    `--dynamic-sampling-filter-path`.

    slime's normalization fails if a reward is missing, and equal rewards teach the model nothing.
    """
    if has_aborted(samples):
        return False
    rewards = {sample.get_reward_value(args) for sample in leaves(samples)}
    return len(rewards) > 1
