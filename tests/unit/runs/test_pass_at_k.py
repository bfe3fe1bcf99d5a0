"""pass@k and pass^k: against enumeration, tau-bench's numbers, and a simulation."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import episode, summary_of

from toolroll.evaluation.report import report
from toolroll.evaluation.viewer.data import row
from toolroll.rollout.runs.pass_at_k import (
    Estimate,
    UnequalSamplesError,
    mean_over_tasks,
    pass_at_k,
    pass_bounds,
    pass_estimates,
    pass_hat_k,
    passed,
)

rewards_of_tasks = st.integers(1, 6).flatmap(
    lambda n: st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n), min_size=1, max_size=6
    )
)


@given(rewards=rewards_of_tasks, data=st.data())
def test_they_are_shares_of_all_choices(rewards: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards[0])))
    choices = [[[r == 1.0 for r in chosen] for chosen in combinations(task, k)] for task in rewards]
    for found, rule in ((pass_hat_k(rewards, k), all), (pass_at_k(rewards, k), any)):
        expected = sum(sum(map(rule, task)) / len(task) for task in choices) / len(choices)
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_intervals_hold_the_truth_as_often_as_they_say(k: int) -> None:
    """The success rates of tasks are Beta(2, 1): pass^k is E[p^k] = 2 / (2 + k)."""
    rng = np.random.default_rng(5)
    truth = 2 / (2 + k)
    inside, values = 0, []
    for _ in range(400):
        chances = rng.beta(2, 1, size=60)
        rewards = {f"t{i}": list((rng.random(8) < p).astype(float)) for i, p in enumerate(chances)}
        estimate = mean_over_tasks([comb(int(sum(r)), k) / comb(8, k) for r in rewards.values()])
        assert estimate.value == pytest.approx(pass_hat_k(list(rewards.values()), k))
        values.append(estimate.value)
        inside += estimate.low <= truth <= estimate.high
    assert np.mean(values) == pytest.approx(truth, abs=3 * np.std(values) / 20), "without bias"  # type: ignore[arg-type]
    assert 0.92 <= inside / 400 <= 0.98, "95 % of them"


@pytest.mark.parametrize(
    ("value", "tasks", "low", "high"),
    [(0, 10, 0, 0.3085), (1, 3, 0.2924, 1), (1, 100, 0.9638, 1), (0.5, 1, 0.0125, 0.9875)],
)
def test_equal_values_leave_room_for_more(
    value: float, tasks: int, low: float, high: float
) -> None:
    """Clopper and Pearson, for 0 and 1 (scipy.stats.binomtest gives the same)."""
    estimate = mean_over_tasks([value] * tasks)
    interval = (estimate.value, estimate.low, estimate.high)
    assert interval == pytest.approx((value, low, high), abs=1e-4)
    assert mean_over_tasks([value] * tasks) == estimate


def test_rewards_outside_of_0_to_1_have_no_such_bound() -> None:
    assert mean_over_tasks([7.0, 7.0]) == Estimate(7.0, 7.0, 7.0)


def test_unequal_samples_are_refused_unless_told() -> None:
    rewards = {"a": [1.0, 0.0], "b": [1.0], "c": []}
    words = r"between 1 and 2 graded samples \(1 of 2 have fewer than 2\)"
    with pytest.raises(UnequalSamplesError, match=words):
        pass_estimates(rewards)
    found = pass_estimates(rewards, allow_unequal=True)
    assert list(found["pass^k"]) == [1]
    assert found["pass^k"][1].value == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("reward", "passes"),
    [
        *((reward, True) for reward in (1.0, 0.9999995, 1.0000005)),
        *((reward, False) for reward in (1.1, 2.5, 0.99, -1.0)),
    ],
)
def test_a_pass_is_a_reward_of_1_in_every_number(reward: float, passes: bool) -> None:
    """tau-bench's rule has a margin in both directions."""
    played = episode(reward=reward)
    found = report(summary_of(played))
    assert passed(reward) is passes
    assert pass_hat_k([[reward]], 1) == pass_at_k([[reward]], 1) == float(passes)
    assert summary_of(played).pass_rate == float(passes)
    assert found["pass@k"]["1"]["value"] == found["pass^k"]["1"]["value"] == float(passes)
    assert row(played)["passed"] is passes
    outside = not 0 <= reward <= 1 and not passes
    assert any("outside [0, 1]" in line for line in found["warnings"]) is outside


def test_bounds_count_missing_samples_as_failed_and_as_passed() -> None:
    graded = {"a": [1.0, 1.0, 0.0], "b": [1.0]}
    bounds = pass_bounds(graded, {"a": 3, "b": 3, "c": 3})
    assert set(bounds["pass^k"]) == set(bounds["pass@k"]) == {1, 2, 3}
    for k in (1, 2, 3):
        for at, missing in enumerate((0.0, 1.0)):
            whole = [(graded.get(task, []) + [missing] * 3)[:3] for task in "abc"]
            assert bounds["pass^k"][k][at] == pytest.approx(pass_hat_k(whole, k))
            assert bounds["pass@k"][k][at] == pytest.approx(pass_at_k(whole, k))


def test_nothing_gives_nothing() -> None:
    given: list[dict[str, list[float]]] = [{}, {"a": []}]
    for empty in given:
        with pytest.raises(ValueError, match="no task is graded"):
            pass_estimates(empty)
    with pytest.raises(ValueError, match="k = 3 needs at least 3"):
        pass_hat_k([[1.0, 1.0]], 3)
    with pytest.raises(ValueError):
        pass_at_k([], 1)


def test_pass_hat_k_of_tau_benchs_trials_is_what_it_prints() -> None:
    """gpt-4o's passes in the airline tasks, and what `display_metrics` prints for them."""
    passes = "01100111000142021140430040220122003443413241222144"
    rewards = [[1.0] * int(count) + [0.0] * (4 - int(count)) for count in passes]
    assert [round(pass_hat_k(rewards, k), 3) for k in (1, 2, 3, 4)] == [0.42, 0.273, 0.22, 0.2]
