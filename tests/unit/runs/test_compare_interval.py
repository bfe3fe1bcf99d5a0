"""The interval of `toolroll compare`: how often it holds the true difference, how often it sees one
that is not there, and whether its power is the stated one.
"""

from __future__ import annotations

import pytest
from support.simulated_benchmarks import Population, agresti_min, percentile, rates

PAIRS = 800


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("difference", [0.0, 0.03, 0.1])
def test_it_covers_and_sees_as_often_as_it_says(samples: int, difference: float) -> None:
    found = rates(Population.of(0.5, difference), 100, samples, PAIRS)
    assert 0.93 <= found.covered <= 0.97
    if difference:
        assert found.seen == pytest.approx(found.power, abs=0.03)
    else:
        assert found.seen <= 0.06  # 0.05, and what chance adds to it


@pytest.mark.parametrize("samples", [1, 4])
def test_it_holds_where_almost_every_task_passes(samples: int) -> None:
    population = Population.of(0.97, 0.02)
    assert rates(population, 33, samples, 200).covered >= 0.95
    assert rates(population, 33, samples, 200, percentile).covered < 0.92


def test_samples_of_one_task_are_not_taken_for_tasks() -> None:
    """With 4 samples a task, an interval for pairs of samples sees nothing."""
    population = Population.of(0.2, 0.1)
    ours, pairs = (rates(population, 33, 4, 200, each).seen for each in (None, agresti_min))
    assert ours > pairs + 0.1
