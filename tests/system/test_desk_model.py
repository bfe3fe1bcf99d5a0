"""The package's model earns what the documentation says, and is served without torch."""

import json
import sys
import urllib.request
from pathlib import Path

import pytest
from support.patience import PATIENCE
from support.processes import get_json, serving

from toolroll import Model, RolloutArgs, load_environment
from toolroll.rollout.episode import Episode
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
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


def test_the_command_serves_a_model_without_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from toolroll.cli import main; main()"
    options = ["engine", "--model", str(desk_model_path()), "--context-length", "512", "--port"]
    command = lambda port: [sys.executable, "-c", code, *options, str(port)]
    body = json.dumps({"input_ids": [300], "sampling_params": {"max_new_tokens": 4}}).encode()
    with serving(
        command, ready="/health", environment={}, log=tmp_path / "log", name="the embedded engine"
    ) as server:
        request = urllib.request.Request(
            f"{server.url}/generate", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert len(json.loads(response.read())["output_ids"]) == 4
        assert get_json(f"{server.url}/server_info")[1]["context_length"] == 512
