"""Rewards that are normalized within groups, against slime's own formula."""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Any

import pytest

from toolroll.rollout.errors import UsageError
from toolroll.trainers.slime import normalize_rewards


def arguments(**given: Any) -> Namespace:
    """slime's arguments, with its defaults."""
    defaults = {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "reward_key": None,
    }
    return Namespace(**{**defaults, **given})


def of_slime(groups: list[list[float]], *, divided: bool) -> list[float]:
    """What slime computes for groups of equal size (its ray/rollout.py)."""
    found = []
    for group in groups:
        mean = statistics.fmean(group)
        deviation = statistics.stdev(group) + 1e-6 if divided else 1.0
        found += [(reward - mean) / deviation for reward in group]
    return found


GROUPS = [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]


def samples(sample_type: Any) -> list[Any]:
    """The samples of `GROUPS`."""
    return [
        sample_type(group_index=at, index=4 * at + place, reward=reward)
        for at, group in enumerate(GROUPS)
        for place, reward in enumerate(group)
    ]


@pytest.mark.parametrize(
    ("given", "divided"),
    [
        ({}, True),
        ({"grpo_std_normalization": False}, False),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, False),
    ],
)
def test_a_forked_episode_counts_once(
    sample_type: Any, given: dict[str, Any], divided: bool
) -> None:
    """slime took one mean of the batch, in which a forked episode counted for each sample."""
    expected = of_slime(GROUPS, divided=divided)
    whole = samples(sample_type)
    raw, rewards = normalize_rewards(arguments(**given), whole)
    assert raw == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert rewards == pytest.approx(expected)
    sibling = sample_type(group_index=0, index=0, rollout_id=0, reward=1.0)
    whole[0].rollout_id = 0
    raw, rewards = normalize_rewards(arguments(**given), [whole[0], sibling, *whole[1:]])
    assert raw[:3] == [1.0, 1.0, 1.0] and len(raw) == 9
    assert rewards == pytest.approx([expected[0], *expected])


def test_equal_rewards_and_groups_of_one_are_zero(sample_type: Any) -> None:
    given = [sample_type(group_index=at // 2, index=at, reward=0.1) for at in range(3)]
    assert normalize_rewards(arguments(), given)[1] == pytest.approx([0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    "given", [{"advantage_estimator": "ppo"}, {"rewards_normalization": False}]
)
def test_other_estimators_get_the_raw_rewards(sample_type: Any, given: dict[str, Any]) -> None:
    raw, rewards = normalize_rewards(arguments(**given), samples(sample_type))
    assert raw == rewards == [reward for group in GROUPS for reward in group]


def test_a_reward_key_is_followed(sample_type: Any) -> None:
    given = [sample_type(group_index=0, index=at, reward={"a": float(at)}) for at in range(2)]
    args = arguments(reward_key="a", grpo_std_normalization=False)
    assert normalize_rewards(args, given) == ([0.0, 1.0], [-0.5, 0.5])


def test_a_sample_without_a_group_or_a_reward_is_refused(sample_type: Any) -> None:
    with pytest.raises(UsageError, match="sample 3 has no group_index"):
        normalize_rewards(arguments(), [sample_type(index=3, reward=1.0)])
    with pytest.raises(UsageError, match="sample 3 has no reward: drop such groups"):
        normalize_rewards(arguments(), [sample_type(group_index=0, index=3)])


def test_what_the_samples_of_an_episode_share(sample_type: Any) -> None:
    """The `rollout_id`, or else the index. A sample without both is an episode of its own."""
    args = arguments(grpo_std_normalization=False)
    for name in ("rollout_id", "index"):
        forked = [
            sample_type(group_index=0, reward=1.0 - episode, **{name: episode})
            for episode in (0, 0, 1, 1, 1)
        ]
        assert normalize_rewards(args, forked)[1] == pytest.approx([0.5, 0.5, -0.5, -0.5, -0.5])
    alone = [sample_type(group_index=0, reward=reward) for reward in (1.0, 1.0, 0.0)]
    assert normalize_rewards(args, alone)[1] == pytest.approx([1 / 3, 1 / 3, -2 / 3])
