"""Filters for groups of samples that may be trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def leaves(group: Iterable[Any]) -> Iterator[Any]:
    """Return the samples of a group, with forked episodes flattened."""
    for item in group:
        if isinstance(item, list):
            yield from leaves(item)
        else:
            yield item


def has_aborted(group: Iterable[Any]) -> bool:
    """Return True if an episode of the group has no reward."""
    return any(sample.reward is None or sample.status.name == "ABORTED" for sample in leaves(group))


def keep_group(args: Any, samples: Sequence[Any], **unused: Any) -> bool:
    """Keep groups in which all episodes were graded and the rewards differ. For
    `--dynamic-sampling-filter-path`.

    slime's normalization fails on a missing reward, and equal rewards teach the model nothing.
    """
    if has_aborted(samples):
        return False
    rewards = {sample.get_reward_value(args) for sample in leaves(samples)}
    return len(rewards) > 1
