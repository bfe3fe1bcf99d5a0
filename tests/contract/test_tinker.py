"""The Tinker adapter with tinker's own types, and tinker-cookbook's own rollouts with the adapter's
environment. The versions are tinker 0.38.0 with tinker-cookbook 0.6.1, and, by `make test-tinker`,
0.25.0 with 0.5.4.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from support.gradients import Row, assert_equal, gradient, policy_of, step
from support.tinker_mirror import SamplingClient, TrainingClient, is_old
from support.tiny_llama import write_model
from unit.adapters.test_same_episodes import (
    EPISODES,
    MAX_NEW,
    Played,
    World,
    expected,
    of_datum,
    with_tinker,
    world,
)

from toolroll.rollout.errors import RolloutError
from toolroll.rollout.types import GenerateRequest
from toolroll.trainers.driven import DrivenPlayer
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.tinker import TinkerEngine, ToolrollEnv, ToolrollGroup

pytest.importorskip("tinker", reason="tinker is not installed")
pytest.importorskip("tinker_cookbook.rl.rollouts", reason="tinker-cookbook is not installed")

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # tinker's, of what it deprecates


async def in_order(made: World) -> list[Played]:
    oracle = await expected(made)
    return [oracle[index] for index in EPISODES]


@pytest.mark.parametrize("history", ["kept", "forks"])
async def test_its_data_are_what_was_served_and_sampled(history: str, tmp_path: Path) -> None:
    async with world(history, tmp_path) as made:
        assert await with_tinker(made) == await in_order(made)


# --- tinker-cookbook ------------------------------------------------------------------------------


async def rollout(made: World, group: ToolrollGroup, http: aiohttp.ClientSession) -> Any:
    """tinker-cookbook's rollout of a group."""
    completers: Any = import_module("tinker_cookbook.completers")
    policy = completers.TinkerTokenCompleter(
        SamplingClient(made.engine.url, http), max_tokens=MAX_NEW
    )
    return await import_module("tinker_cookbook.rl.rollouts").do_group_rollout(group, policy)


@pytest.mark.parametrize("history", ["kept", "forks"])
async def test_the_cookbooks_data_are_what_was_served_and_sampled(
    history: str, tmp_path: Path
) -> None:
    to_data = import_module("tinker_cookbook.rl.data_processing").trajectory_to_data
    async with world(history, tmp_path) as made, aiohttp.ClientSession() as http:
        settings = EpisodeSettings(**made.settings, context_length=8192)
        player = DrivenPlayer(made.tokenizer, settings)
        groups = [ToolrollGroup(player, index, 1) for index in EPISODES]
        found = await asyncio.gather(*(rollout(made, group, http) for group in groups))
        oracle = await in_order(made)
    played = []
    for group in found:
        [reward], [trajectory] = group.get_total_rewards(), group.trajectories_G
        played.append(Played(list(map(of_datum, to_data(trajectory, 1.0))), reward))
    assert played == oracle
    assert {group.trajectories_G[0].stop_reason for group in found} == {"completed"}


async def test_the_cookbooks_step(tmp_path: Path) -> None:
    """Its own data, in a step of its own, have the gradient of what was served and sampled."""
    torch = pytest.importorskip("torch", reason="the loss needs torch for the CPU")
    weights, asked = (-0.5,), EPISODES[:1]
    async with world("forks", tmp_path) as made, aiohttp.ClientSession() as http:
        player = DrivenPlayer(made.tokenizer, EpisodeSettings(**made.settings))
        groups = [ToolrollGroup(player, index, 1) for index in asked]
        found = await asyncio.gather(*(rollout(made, group, http) for group in groups))
        oracle = await expected(made)
    write_model(tmp_path, max_position_embeddings=8192)
    client = TrainingClient(policy_of(tmp_path))
    data, _ = import_module("tinker_cookbook.rl.data_processing").assemble_training_data(
        found, [torch.tensor([weight]) for weight in weights]
    )
    train_step = import_module("tinker_cookbook.rl.train").train_step
    await train_step(data, client, learning_rate=0.1, num_substeps=2, loss_fn="importance_sampling")
    rows = [
        (Row(one.ids, one.mask, [*one.logprobs]), importance_sampling_of(weight))
        for index, weight in zip(asked, weights, strict=True)
        for one in oracle[index].sequences
    ]
    assert len(client.trained) == len(rows) > len(asked) and client.steps == 2
    assert_equal(gradient(client.policy), step(policy_of(tmp_path), rows))


def importance_sampling_of(advantage: float) -> Any:
    return lambda logps, old: -((logps - old).exp() * advantage).sum()


async def test_a_group(tmp_path: Path) -> None:
    """Four episodes of one task, which `cleanup` closes, and a retry's."""
    async with world("kept", tmp_path) as made, aiohttp.ClientSession() as http:
        settings = EpisodeSettings(**made.settings, context_length=8192)
        group = ToolrollGroup(DrivenPlayer(made.tokenizer, settings), EPISODES[0], 4)
        found = await rollout(made, pickle.loads(pickle.dumps(group)), http)
        assert len(found.trajectories_G) == 4 and len(set(found.get_total_rewards())) == 1
        [env, *_], again = await group.make_envs(), await group.make_envs()
        observation, stop = await env.initial_observation()
        assert observation.to_ints() == found.trajectories_G[0].transitions[0].ob.to_ints()
        assert stop == [made.tokenizer.eos_token_id] and len(again) == 4
        assert len(pickle.dumps(group)) and group.logging_tags() == ["desk"]
        assert await group.compute_group_rewards([None], []) == [(0.0, {})]
        await group.cleanup()
        await group.cleanup()
    with pytest.raises(asyncio.CancelledError):
        _ = env.episode.result


async def test_what_must_not_be_trained_is_an_error(tmp_path: Path) -> None:
    """Also with a strategy that tries again: the group is left out."""
    async with world("kept", tmp_path) as made, aiohttp.ClientSession() as http:
        settings = EpisodeSettings(**made.settings, context_length=8192)
        masked = settings.filled(agent_args={"mask_invalid": True})
        with pytest.raises(RolloutError, match=r"must not be trained \(invalid call\)"):
            for index in EPISODES:
                await rollout(
                    made, ToolrollGroup(DrivenPlayer(made.tokenizer, masked), index, 1), http
                )
        env, *_ = await ToolrollGroup(
            DrivenPlayer(made.tokenizer, settings), EPISODES[0], 1
        ).make_envs()
        await env.initial_observation()
        with pytest.raises(RolloutError, match=r"aborted: .*the model's vocabulary"):
            await env.step([10**6])


async def test_a_prompt_that_is_too_long_ends_the_episode(tmp_path: Path) -> None:
    async with world("kept", tmp_path) as made, aiohttp.ClientSession() as http:
        settings = EpisodeSettings(**made.settings, context_length=16)
        found = await rollout(
            made, ToolrollGroup(DrivenPlayer(made.tokenizer, settings), 0, 2), http
        )
        assert made.engine.log == []
    assert found.get_total_rewards() == [0.0, 0.0]
    assert {one.stop_reason for one in found.trajectories_G} == {"context_overflow"}


async def test_a_turn_that_the_sampler_cut_is_truncated(tmp_path: Path) -> None:
    """Its last token may even be a stop token: the sampler's reason counts."""
    async with world("kept", tmp_path) as made:
        settings = EpisodeSettings(**made.settings, context_length=8192)
        env, *_ = await ToolrollGroup(
            DrivenPlayer(made.tokenizer, settings), EPISODES[0], 1
        ).make_envs()
        _, stop = await env.initial_observation()
        done = await env.step([65, *stop], extra={"stop_reason": "length"})
    assert (done.episode_done, done.metrics["stop/max_tokens"]) == (True, 1.0)


@pytest.mark.parametrize(
    ("name", "ours"), [("Env", ToolrollEnv), ("EnvGroupBuilder", ToolrollGroup)]
)
def test_the_methods_are_the_cookbooks(name: str, ours: type[Any]) -> None:
    theirs = getattr(import_module("tinker_cookbook.rl.types"), name)
    methods = {key: one for key, one in vars(theirs).items() if inspect.isfunction(one)}
    assert methods
    for key, method in methods.items():
        own = getattr(ours, key)
        assert list(inspect.signature(own).parameters) == list(inspect.signature(method).parameters)
        assert inspect.iscoroutinefunction(own) is inspect.iscoroutinefunction(method)


# --- tinker ---------------------------------------------------------------------------------------


async def test_the_futures_of_tinker() -> None:
    """tinker 0.38 wraps the future that 0.25 returned, and warns of its methods."""
    tinker, sampling = import_module("tinker"), Future[Any]()
    fields = {} if is_old() else {"sequence_id": "a"}
    sequence = tinker.SampledSequence(
        stop_reason="stop",
        tokens_np=np.array([3, 9], np.int32),
        logprobs_np=np.array([-1.0, -2.0], np.float32),
        **fields,
    )
    sampling.set_result(tinker.SampleResponse(sequences=[sequence]))
    future: Any = sampling
    if not is_old():
        kept = import_module("tinker.lib.backcompat_concurrent_future")
        future = kept._AwaitableFutureCompatWrapper(sampling)
    seen: dict[str, Any] = {}
    client = SimpleNamespace(sample=lambda **given: seen.update(given) or future)
    engine = TinkerEngine(client, context_length=64, vocab_size=10)
    params = {"max_new_tokens": 8, "stop_token_ids": [9], "sampling_seed": 3, "top_k": 5}
    turn = await engine.generate(GenerateRequest(np.array([1, 2], np.int32), params, "session"))
    assert turn.output_ids.tolist() == [3, 9] and (turn.finish_reason, turn.matched) == ("stop", 9)
    assert turn.logprobs is not None and turn.logprobs.tolist() == [-1.0, -2.0]
    sent = seen["sampling_params"].model_dump(exclude_unset=True)
    assert sent == {"max_tokens": 8, "stop": [9], "seed": 3, "top_k": 5}
    assert seen["prompt"].to_ints() == [1, 2]
