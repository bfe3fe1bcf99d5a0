"""Routed experts of a mixture-of-experts model: asked for, read, carried to the trajectory and
the episode file, or missed aloud.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.engine.response import parse_completion
from toolroll.rollout.errors import CompletionError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.episode_file import EpisodeStore, read_episodes
from toolroll.rollout.runs.registry import load_environment
from toolroll.rollout.settings import RolloutArgs
from toolroll.rollout.testing import EmbeddedEngine
from toolroll.rollout.types import EnvironmentOptions, Episode, GenerateRequest


def request(ids: list[int]) -> GenerateRequest:
    return GenerateRequest(np.array(ids, dtype=np.int32), {"max_new_tokens": 4}, "s")


async def test_an_episodes_experts_cover_all_its_tokens_but_the_last(
    tokenizer: Any, tmp_path: Path
) -> None:
    desk = load_environment("desk")
    task = desk.tasks("test")[0]
    async with EmbeddedEngine(tokenizer, lambda _: "Thank you.") as engine:
        args = RolloutArgs(
            engine=engine.url,
            model="embedded",
            parser="hermes",
            return_routed_experts=True,
        )
        async with Model.from_args(args) as served:
            agent = TrainableToolCallingAgent(model=served, sampling_params={"max_new_tokens": 64})
            result = await agent.asolve(
                desk.make(EnvironmentOptions()), task=task, session_id="s", max_num_steps=3
            )
    [trajectory] = result.trajectories
    assert len(trajectory.turns) > 1
    ids = trajectory.input_ids[:-1]
    # the embedded engine's experts
    expected = np.stack([ids % 8, ids % 7, ids % 5, ids % 3], axis=1)
    assert np.array_equal(trajectory.routed_experts, expected)  # type: ignore[arg-type]
    with EpisodeStore(tmp_path) as store:
        store.append(Episode("desk", task.id, 0, 0, 0, result))
    [read] = read_episodes(tmp_path)
    assert np.array_equal(read.result.trajectories[0].routed_experts, expected)  # type: ignore[arg-type]


async def test_experts_that_were_not_asked_for_are_not_there(tokenizer: Any) -> None:
    async with (
        EmbeddedEngine(tokenizer, lambda _: "Hello.") as served,
        Engine(EngineConfig(engine=served.url)) as client,
    ):
        completion = await client.generate(request([1, 2, 3]))
    assert completion.routed_experts is None


@pytest.mark.parametrize(
    "encoded",
    ["no base64!", base64.b64encode(b"\0" * 10).decode(), base64.b64encode(b"\0" * 20).decode()],
)
def test_unreadable_experts_are_refused(encoded: str) -> None:
    meta = {
        "finish_reason": {"type": "stop"},
        "routed_experts": encoded,
        "output_token_logprobs": [[-1.0, 7, None]],
    }
    with pytest.raises(CompletionError, match="routed_experts"):
        parse_completion({"output_ids": [7], "meta_info": meta}, request([1, 2, 3]))


async def test_experts_that_do_not_come_are_missed_aloud(tokenizer: Any) -> None:
    """As behind router 0.3.2, which drops the field in silence."""
    async with (
        EmbeddedEngine(tokenizer, lambda _: "Hello.") as served,
        Engine(EngineConfig(engine=served.url, return_routed_experts=True)) as client,
    ):
        plain = GenerateRequest(
            np.array([1, 2], dtype=np.int32),
            {"max_new_tokens": 4},
            "s",
            extra={"return_routed_experts": False},
        )
        with pytest.raises(CompletionError, match="--enable-return-routed-experts"):
            await client.generate(plain)
