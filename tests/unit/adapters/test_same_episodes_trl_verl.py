"""TRL's and verl's adapters give the ids, masks, logprobs and rewards of `EpisodePlayer`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from support import verl_mirror
from support.desk_episodes import ByTask, known_tasks
from support.trl_mirror import a_trainer

from toolroll.rollout.adapters.episodes import EpisodePlayer, EpisodeSettings
from toolroll.rollout.adapters.sequences import training_sequences
from toolroll.rollout.adapters.trl import make_rollout_func
from toolroll.rollout.adapters.verl import ToolrollAgentLoop
from toolroll.rollout.model.config import RolloutArgs
from toolroll.rollout.model.model import Model
from toolroll.rollout.testing import EmbeddedEngine, load_embedded_tokenizer

TASKS = known_tasks()[:20]
PARAMS = {"max_new_tokens": 4096, "temperature": 1.0, "top_p": 1.0, "top_k": -1}

Played = tuple[list[int], list[int], list[int], list[float], float | None]
"""Ids of prompt and response, then loss mask and logprobs of the response, and the reward."""


async def with_trl(url: str) -> list[Played]:
    rollout = make_rollout_func({"env": "desk"}, engine_url=url)
    output = await asyncio.to_thread(rollout, [str(task) for task in TASKS], a_trainer(seed=0))
    await asyncio.to_thread(rollout.close)
    names = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "toolroll_reward")
    return list(zip(*(output[name] for name in names), strict=True))


async def with_verl(url: str) -> list[Played]:
    tokenizer = load_embedded_tokenizer()
    played = []
    async with aiohttp.ClientSession() as http:
        given = verl_mirror.loop_arguments(verl_mirror.Servers(url, http), tokenizer)
        for task in TASKS:
            loop = ToolrollAgentLoop(**given, settings={"env": "desk"})
            params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
            made = await loop.run(params, extra_info={"index": task}, raw_prompt=[])
            played.append(
                (
                    made.prompt_ids, made.response_ids, made.response_mask,
                    made.response_logprobs, made.reward_score,
                )
            )  # fmt: skip
    return played


ADAPTERS: dict[str, Callable[[str], Awaitable[list[Played]]]] = {
    "trl": with_trl,
    "verl": with_verl,
}


async def expected(url: str) -> list[Played]:
    args = RolloutArgs(engine_url=url, hf_checkpoint="embedded")
    player = EpisodePlayer(Model.from_args(args), EpisodeSettings(env="desk"))
    played: list[Played] = []
    for task in TASKS:
        result = await player.play(task, PARAMS)
        (one,) = training_sequences(result)
        played.append(
            (one.prompt_ids, one.response_ids, one.loss_mask, one.logprobs, result.reward)
        )
    await player.aclose()
    return played


@pytest.mark.parametrize("name", ADAPTERS)
async def test_the_same_episodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verl_mirror.install(monkeypatch)

    async def served(play: Callable[[str], Awaitable[Any]]) -> Any:
        policy = ByTask(mistakes=0.6)
        async with EmbeddedEngine(load_embedded_tokenizer(), policy) as engine:
            return await play(engine.url)

    known = await served(expected)
    assert [list(one) for one in await served(ADAPTERS[name])] == [list(one) for one in known]
    assert {one[-1] for one in known} == {0.0, 1.0} and len(known) == 20
    assert all(sum(one[2]) for one in known)
