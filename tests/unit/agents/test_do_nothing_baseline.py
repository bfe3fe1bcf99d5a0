"""The do-nothing floor beside each result: what a farewell scores."""

from __future__ import annotations

import pytest
from support.tau import BOTH, TauBench, needed

from toolroll.evaluation.do_nothing import play_floor
from toolroll.rollout.runs.registry import find_environment


@pytest.mark.parametrize("tau", BOTH)
async def test_tau_benchs_floor(tau: TauBench) -> None:
    """Of the package itself 19 of 50 airline tasks, 7 of 115 retail ones."""
    tau = needed(tau)
    for (domain, split), (count, floor) in tau.counts.items():
        if split == "test":
            factory = tau.factory(domain)
            found = await play_floor(factory, factory.tasks(split), max_turns=30)
            assert (found.graded, found.passed) == (count, floor), (domain, split)


@pytest.mark.parametrize("name", ["desk", "bfcl/multi_turn_base", "bfcl/multi_turn_miss_func"])
async def test_doing_nothing_earns_no_reward(name: str) -> None:
    factory = find_environment(name)
    tasks = factory.tasks(factory.splits[0])
    found = await play_floor(factory, tasks, max_turns=30)
    assert (found.graded, found.passed) == (len(tasks), 0)
