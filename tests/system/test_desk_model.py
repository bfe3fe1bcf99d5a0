"""The package's model earns what the documentation says, without torch."""

from __future__ import annotations

import pytest
from support.processes import printed

from toolroll import Model, RolloutArgs, load_environment
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Episode
from toolroll.testing import load_engine

EXPECTED = {"test": (0.0, 0.25), "held-out": (0.8, 1.0)}
"""Bounds of the mean reward at temperature 1, wider than its 99 % interval."""


@pytest.mark.parametrize("split", EXPECTED)
async def test_the_reward_is_within_its_interval(split: str) -> None:
    desk = load_environment("desk", {"policy": "brief"})
    episodes: list[Episode] = []
    async with load_engine(desk_model_path(), keep_log=False) as engine:
        args = RolloutArgs(engine=engine.url, model="desk-1m")
        async with Model.from_args(args) as model:
            make = agent_maker("tool-calling")
            settings = RunSettings(
                sampling_params={"temperature": 1.0, "max_new_tokens": 160}, max_turns=16, samples=3
            )
            runner = Runner(desk, lambda: make(model, {}), settings)
            await runner.run(desk.tasks(split)[:33], episodes.append)
    rewards = [episode.result.reward for episode in episodes]
    assert None not in rewards
    low, high = EXPECTED[split]
    assert low <= sum(reward or 0.0 for reward in rewards) / len(rewards) <= high


def test_the_model_is_served_without_torch() -> None:
    code = (
        "import asyncio, sys\n"
        "sys.modules['torch'] = None\n"
        "from toolroll.rollout.model.tokenizers import desk_model_path\n"
        "from toolroll.testing import load_engine\n"
        "async def main():\n"
        "    async with load_engine(desk_model_path()) as engine:\n"
        "        print(engine.model_name)\n"
        "asyncio.run(main())\n"
    )
    assert printed("-c", code).strip().endswith("desk_1m")
