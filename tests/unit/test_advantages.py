"""Returns, group advantages and their values for each token, against closed forms."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Trajectory, Turn
from toolroll.trainers.advantages import (
    episode_returns,
    group_advantages,
    per_token,
    returns_to_go,
    turn_rewards,
)


def sequence(*turns: Turn, length: int) -> Trajectory:
    mask = np.zeros(length, dtype=np.int32)
    for turn in turns:
        mask[turn.start : turn.stop] = turn.excluded is None
    logprobs = np.full(length, np.nan, dtype=np.float32)
    ids = np.arange(length, dtype=np.int32)
    return Trajectory(ids, mask, logprobs, turns, turns[0].start if turns else length)


def result(reward: float | None, *trajectories: Trajectory) -> InteractionResult:
    return InteractionResult("", reward, [], {}, trajectories=trajectories)


@given(st.lists(st.integers(-9, 9), max_size=12), st.integers(0, 4).map(lambda n: n / 4))
def test_returns_are_discounted_sums(rewards: list[int], gamma: float) -> None:
    values = np.array(rewards, dtype=float)
    expected = [
        math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
        for t in range(len(rewards))
    ]
    assert returns_to_go(values, gamma).tolist() == expected
    assert values.tolist() == rewards
    assert returns_to_go(rewards).tolist() == [sum(rewards[t:]) for t in range(len(rewards))]


def test_returns_go_on_over_a_fork() -> None:
    """Turn 2 forks from turn 0, which is its context: it counts once."""
    first = sequence(Turn(2, 4, "stop", reward=1.0), Turn(5, 6, "stop", reward=2.0), length=6)
    context, own = Turn(2, 4, "stop", excluded="context"), Turn(7, 9, "stop", reward=4.0)
    second = sequence(context, own, length=9)
    episode = result(7.0, first, second)
    assert [found.tolist() for found in episode_returns(episode)] == [[7.0, 6.0], [0.0, 4.0]]
    halved = [found.tolist() for found in episode_returns(episode, gamma=0.5)]
    assert halved == [[3.0, 4.0], [0.0, 4.0]]
    assert [turn_rewards(one).tolist() for one in (first, second)] == [[1.0, 2.0], [0.0, 4.0]]


def test_returns_without_turn_rewards_are_zeros() -> None:
    """As of an endpoint's session, or of an aborted episode. The episode's reward is not read."""
    one, prompt = sequence(Turn(2, 4, "stop"), Turn(5, 6, "stop"), length=6), sequence(length=3)
    for reward in (1.0, None):
        returns = episode_returns(result(reward, one, prompt))
        assert [values.tolist() for values in returns] == [[0.0, 0.0], []]
        assert {str(values.dtype) for values in returns} == {"float64"}
        assert episode_returns(result(reward)) == []


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ((1.0, 0.0, 0.0, 1.0), {}, [0.5, -0.5, -0.5, 0.5]),
        ((3.0, 0.0, 0.0), {"baseline": "leave_one_out"}, [3.0, -1.5, -1.5]),
        ((3.0, 1.0), {"baseline": "none"}, [3.0, 1.0]),
        ((1.0, None, 0.0), {}, [0.5, None, -0.5]),
        ((4.0, 0.0), {"normalize": True}, [1.0, -1.0]),
        ((2.0,), {}, [0.0]),
        ((2.0,), {"baseline": "leave_one_out"}, [0.0]),
        ((None, None), {"normalize": True}, [None, None]),
        ((), {}, []),
    ],
)
def test_advantages_of_a_group(rewards: Any, options: dict[str, Any], expected: Any) -> None:
    assert group_advantages([result(reward) for reward in rewards], **options) == expected


def test_a_forked_episode_counts_once_and_a_baseline_is_known() -> None:
    turn = Turn(1, 2, "stop")
    forked = result(3.0, *(sequence(turn, length=2) for _ in range(5)))
    assert group_advantages([forked, result(0.0)]) == [1.5, -1.5]
    with pytest.raises(UsageError, match="mean, leave_one_out or none, not 'median'"):
        group_advantages([], baseline="median")  # type: ignore[arg-type]


def test_values_of_tokens() -> None:
    bad = Turn(4, 5, "stop", excluded="invalid call")
    trajectory = sequence(Turn(1, 3, "stop"), bad, Turn(6, 8, "stop"), length=9)
    assert per_token(trajectory, 2.0).tolist() == [0, 2, 2, 0, 0, 0, 2, 2, 0]
    assert per_token(trajectory, [1.0, 5.0, -1.0]).tolist() == [0, 1, 1, 0, 0, 0, -1, -1, 0]
    assert per_token(trajectory, 1.0).dtype == np.float32


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_have_no_advantage_whatever_their_rounding(baseline: Any) -> None:
    """The standard deviation of three times 0.1 is 1.4e-17: dividing by it would give -1."""
    group = [result(reward) for reward in (0.1, 0.1, 0.1 + 1e-17, 0.3 - 0.2)]
    assert group_advantages(group, baseline=baseline, normalize=True) == [0.0] * 4


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, "the value is None: leave out episodes without a reward"),
        (math.nan, "must be finite"),
        ([0.1, math.inf, 0.0], "must be finite"),
        (["a", "b", "c"], "must be numbers"),
        ([0.7], r"shape \(1,\): pass one number, or one for each of the 3 turns"),
        ([[0.1, 0.2, 0.3]], "shape"),
    ],
)
def test_values_that_do_not_belong_to_the_turns_are_refused(values: Any, words: str) -> None:
    """None gave NaN, and a list with one value was that of all turns."""
    turns = (Turn(1, 2, "stop"), Turn(2, 3, "stop"), Turn(3, 4, "stop"))
    with pytest.raises(UsageError, match=words):
        per_token(sequence(*turns, length=4), values)
