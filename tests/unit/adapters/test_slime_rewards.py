"""Rewards that are normalized within groups, against slime's own formula."""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Any

import pytest

from toolroll.rollout.errors import UsageError
from toolroll.trainers.slime import normalize_rewards

GROUPS = [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]


def arguments(**given: Any) -> Namespace:
    """slime's arguments, with its defaults."""
    defaults = {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "reward_key": None,
    }
    return Namespace(**{**defaults, **given})


def slime_formula(groups: list[list[float]], *, divided: bool) -> list[float]:
    """What slime computes for groups of equal size (its ray/rollout.py)."""
    normalized = []
    for group in groups:
        mean = statistics.fmean(group)
        deviation = statistics.stdev(group) + 1e-6 if divided else 1.0
        normalized += [(reward - mean) / deviation for reward in group]
    return normalized


@pytest.mark.parametrize(
    ("given", "divided"),
    [
        ({}, True),
        ({"grpo_std_normalization": False}, False),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, False),
        ({"advantage_estimator": "ppo"}, None),
        ({"rewards_normalization": False}, None),
    ],
    ids=str,
)
def test_a_fork_counts_once(sample_type: Any, given: dict[str, Any], divided: bool | None) -> None:
    """slime takes one mean of the batch, in which a forked episode counts for each sample. Other
    estimators (`divided` is None) get the raw rewards.
    """
    rewards = [reward for group in GROUPS for reward in group]
    samples = [sample_type(group_index=i // 4, index=i, reward=r) for i, r in enumerate(rewards)]
    expected = rewards if divided is None else slime_formula(GROUPS, divided=divided)
    raw, normalized = normalize_rewards(arguments(**given), samples)
    assert raw == rewards and normalized == pytest.approx(expected)
    samples[0].rollout_id = 0
    sibling = sample_type(group_index=0, index=0, rollout_id=0, reward=1.0)
    raw, normalized = normalize_rewards(arguments(**given), [samples[0], sibling, *samples[1:]])
    assert raw == [1.0, *rewards] and normalized == pytest.approx([expected[0], *expected])


@pytest.mark.parametrize(
    ("episodes", "expected"),
    [
        pytest.param([{"rollout_id": n} for n in (0, 0, 1, 1, 1)], [0.5] * 2 + [-0.5] * 3, id="id"),
        pytest.param([{"index": n} for n in (0, 0, 1, 1, 1)], [0.5] * 2 + [-0.5] * 3, id="index"),
        pytest.param([{}] * 5, [0.6] * 2 + [-0.4] * 3, id="neither: five episodes"),
        pytest.param([{"group_index": n} for n in range(5)], [0.0] * 5, id="groups of one"),
    ],
)
def test_what_the_samples_of_an_episode_share(
    sample_type: Any, episodes: list[dict[str, int]], expected: list[float]
) -> None:
    rewards = [{"key": reward} for reward in (1.0, 1.0, 0.0, 0.0, 0.0)]
    samples = [
        sample_type(reward=reward, **{"group_index": 0, **fields})
        for reward, fields in zip(rewards, episodes, strict=True)
    ]
    args = arguments(reward_key="key", grpo_std_normalization=False)
    assert normalize_rewards(args, samples)[1] == pytest.approx(expected)


def test_equal_rewards_and_groups_of_one_are_zero(sample_type: Any) -> None:
    samples = [sample_type(group_index=i // 2, index=i, reward=0.1) for i in range(3)]
    assert normalize_rewards(arguments(), samples)[1] == pytest.approx([0.0, 0.0, 0.0])


def test_a_sample_without_a_group_or_a_reward_is_refused(sample_type: Any) -> None:
    for fields, words in (
        ({"reward": 1.0}, "sample 3 has no group_index"),
        ({"group_index": 0}, "sample 3 has no reward: drop such groups"),
    ):
        with pytest.raises(UsageError, match=words):
            normalize_rewards(arguments(), [sample_type(index=3, **fields)])
