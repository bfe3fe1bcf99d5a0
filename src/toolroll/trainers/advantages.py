"""Compute turn rewards, returns and group advantages, and assign them to tokens.

An episode counts once, even if it forked into several sequences. An aborted episode has no reward,
so it is left out of every baseline, and its advantage is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.jsonable import shown
from toolroll.rollout.types import Trajectory

Values: TypeAlias = npt.NDArray[np.float64]
Baseline = Literal["mean", "leave_one_out", "none"]


def turn_rewards(trajectory: Trajectory) -> Values:
    """Return the reward of each turn of `trajectory`, float64 [turns].

    If an episode forked, a sequence may begin with turns of an earlier sequence. In the later
    sequence these turns have mask 0 and the reward 0, because the earlier sequence trains them and
    has their rewards. So the rewards of all turns of an episode add up to the episode's reward.
    """
    return np.array([turn.reward for turn in trajectory.turns], dtype=np.float64)


def returns_to_go(rewards: Sequence[float] | Values, gamma: float = 1.0) -> Values:
    """Return each turn's reward plus the discounted rewards after it, float64 [turns]. The value at
    t is the sum of `gamma ** (k - t) * rewards[k]` over k >= t.

    Example:
        >>> returns_to_go([0.0, 0.0, 1.0], gamma=0.5).tolist()
        [0.25, 0.5, 1.0]
    """
    returns = np.array(rewards, dtype=np.float64)
    for turn in range(len(returns) - 2, -1, -1):
        returns[turn] += gamma * returns[turn + 1]
    return returns


def episode_returns(result: InteractionResult, gamma: float = 1.0) -> list[Values]:
    """Return the returns-to-go of an episode: a list with one array per trajectory in
    `result.trajectories`, in the same order. Each array is float64 [turns of that trajectory].

    If the episode forked, the discount runs over the turns of all trajectories, in the order in
    which they were played. A turn that a fork copies from an earlier trajectory gets 0 in the fork,
    because it is not trained there.

    Only `Turn.reward` is read, never `result.reward`. toolroll's agents set `Turn.reward`, unless
    the episode was aborted. Trajectories from an endpoint's session do not have it, so all their
    values are 0.0: use `group_advantages` for them, or pass the reward to `per_token`.

    Example:
        episode_returns(result, gamma=0.5)  # rewards 0, 0, 1 of three turns: [[0.25, 0.5, 1.0]]
    """
    own_turns = [
        (number, index)
        for number, trajectory in enumerate(result.trajectories)
        for index, turn in enumerate(trajectory.turns)
        if turn.excluded != "context"
    ]
    rewards = [result.trajectories[number].turns[index].reward for number, index in own_turns]
    arrays = [np.zeros(len(trajectory.turns)) for trajectory in result.trajectories]
    for (number, index), value in zip(own_turns, returns_to_go(rewards, gamma), strict=True):
        arrays[number][index] = value
    return arrays


def group_advantages(
    results: Sequence[InteractionResult],
    *,
    baseline: Baseline = "mean",
    normalize: bool = False,
) -> list[float | None]:
    """Return the advantage of each episode in a group: its reward minus the baseline.

    `baseline`: "mean" is the mean of the group (GRPO), "leave_one_out" is the mean of the other
    episodes (RLOO), and "none" is 0. If `normalize` is True, the differences are divided by the
    population standard deviation of the group's rewards. Episodes without a reward get None and do
    not count.

    If all rewards are equal up to rounding, all advantages are 0. With `baseline="none"` and
    `normalize=False`, the advantages are always the rewards themselves.

    Example:
        group_advantages(results)  # rewards 1, 0, 0, None: [0.667, -0.333, -0.333, None]
    """
    if baseline not in ("mean", "leave_one_out", "none"):
        raise UsageError(f"baseline must be mean, leave_one_out or none, not {baseline!r}")
    rewards = np.array(
        [result.reward for result in results if result.reward is not None], dtype=np.float64
    )
    # Rounding may give equal rewards a deviation above 0. Dividing by it would give +-1.
    equal = not len(rewards) or np.allclose(rewards, rewards[0], rtol=1e-9, atol=1e-12)
    if baseline == "none":
        values = rewards
    elif equal:
        values = np.zeros(len(rewards))
    elif baseline == "mean":
        values = rewards - rewards.mean()
    else:
        values = rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
    if normalize:
        values = np.zeros(len(rewards)) if equal else values / rewards.std()
    remaining = iter(values.tolist())
    return [None if result.reward is None else next(remaining) for result in results]


def per_token(
    trajectory: Trajectory, values: float | Sequence[float] | Values
) -> npt.NDArray[np.float32]:
    """Return the value of each token, float32 [n]. It is 0 for every token with loss mask 0.

    `values`: one value for the whole sequence (an episode's advantage), or one for each turn. Raise
    `UsageError` for anything else, such as the advantage None of an aborted episode.
    """
    tokens = np.zeros(len(trajectory), dtype=np.float32)
    turns = trajectory.turns
    of_turns = np.broadcast_to(_checked(values, len(turns)), (len(turns),))
    for turn, value in zip(turns, of_turns, strict=True):
        tokens[turn.start : turn.stop] = value
    tokens[trajectory.loss_mask == 0] = 0.0
    return tokens


def _checked(values: Any, turns: int) -> npt.NDArray[np.float32]:
    if values is None:
        raise UsageError("the value is None: leave out episodes without a reward")
    try:
        array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the values must be numbers, not {shown(values)}") from error
    if not np.isfinite(array).all():
        raise UsageError(f"the values must be finite, not {shown(values)}")
    if array.ndim and array.shape != (turns,):
        raise UsageError(
            f"the values have the shape {array.shape}: pass one number, or one for each of the "
            f"{turns} turns"
        )
    return array
