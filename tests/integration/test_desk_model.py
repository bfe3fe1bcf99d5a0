"""The package's model on the real SGLang: it calls tools, and the embedded engine agrees. There it
earns what the documentation says, and is served without torch."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.learn_desk.network import load_network, save_network
from examples.learn_desk.play import play
from examples.learn_desk.tokenizer import FILES, load_tokenizer
from support.patience import PATIENCE
from support.processes import Server, get_json, serving
from support.servers import sglang_server

from toolroll import Model, RolloutArgs, RunSettings, load_environment
from toolroll.environments.desk import DESK
from toolroll.rollout.episode import Episode
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.types import Status
from toolroll.testing import load_engine

TASKS = DESK.tasks("held-out")[:12]
CLOSE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in float32, so that both engines compute with the same weights."""
    found = tmp_path_factory.mktemp("desk-model")
    save_network(load_network(desk_model_path()), found, torch.float32)
    for name in FILES:
        (found / name).write_bytes((desk_model_path() / name).read_bytes())
    return found


@pytest.fixture(scope="module")
def sglang_desk(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SGLang with the package's model in float32."""
    logs = tmp_path_factory.mktemp("servers")
    with sglang_server(logs, name="sglang-desk", model=folder) as server:
        yield server


async def played(url: str, folder: Path, temperature: float = 0.0) -> dict[str, Episode]:
    episodes = await play(
        url, load_tokenizer(folder), TASKS, temperature=temperature, concurrency=4
    )
    assert all(episode.result.status is not Status.ABORTED for episode in episodes)
    return {episode.task_id: episode for episode in episodes}


async def test_both_engines_play_the_same_episodes(sglang_desk: Server, folder: Path) -> None:
    """At temperature 0. If a token differs, its two best logits are almost equal."""
    theirs = await played(sglang_desk.url, folder)
    async with load_engine(folder) as engine:
        ours = await played(engine.url, folder)
    network = load_network(folder)
    equal = 0
    for name, episode in theirs.items():
        [one], [other] = episode.result.trajectories, ours[name].result.trajectories
        length = min(len(one), len(other))
        differs = np.flatnonzero(one.input_ids[:length] != other.input_ids[:length])
        end = int(differs[0]) if len(differs) else length
        trained = one.loss_mask[:end] == 1
        assert np.abs(one.logprobs[:end] - other.logprobs[:end])[trained].max() < CLOSE
        if len(differs):
            with torch.no_grad():
                ids = torch.from_numpy(one.input_ids[:end].astype(np.int64)).unsqueeze(0)
                best = network.logits(network(ids)[0, -1]).topk(2).values
            assert float(best[0] - best[1]) < CLOSE
        else:
            equal += len(one) == len(other)
    assert equal >= len(TASKS) - 2
    rewards = [episode.result.reward for episode in theirs.values()]
    assert np.mean([reward or 0.0 for reward in rewards]) > 0.8
    calls = sum(episode.result.metrics["tool_calls"] for episode in theirs.values())
    assert calls >= len(TASKS)


async def test_the_servers_logprobs_are_the_trainers(sglang_desk: Server, folder: Path) -> None:
    network = load_network(folder)
    for episode in (await played(sglang_desk.url, folder, temperature=1.0)).values():
        for trajectory in episode.result.trajectories:
            ids = torch.from_numpy(trajectory.input_ids.astype(np.int64)).unsqueeze(0)
            where = torch.from_numpy(trajectory.loss_mask == 1).unsqueeze(0)
            with torch.no_grad():
                own = network.logprobs(ids, where).numpy()
            recorded = trajectory.logprobs[trajectory.loss_mask == 1]
            assert np.abs(own - recorded).max() < CLOSE


# --- on the embedded engine -----------------------------------------------------------------------

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
