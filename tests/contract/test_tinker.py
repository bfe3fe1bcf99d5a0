"""The Tinker adapter with tinker's own types, and tinker-cookbook's own rollouts with the adapter's
environment. The versions are tinker 0.38.0 with tinker-cookbook 0.6.1, and, by `make test-tinker`,
0.25.0 with 0.5.4.
"""

import asyncio
import pickle
import re
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.forked_episodes import episode
from support.slime_trainer import plays_the_reference
from support.source import ROOT
from support.tinker_mirror import SamplingClient, is_old
from support.vocabulary import Vocabulary
from unit.adapters import test_same_episodes as same

from toolroll.rollout.errors import CompletionError, RolloutError, TokenError, UsageError
from toolroll.rollout.types import GenerateRequest
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer
from toolroll.trainers.driven import DrivenPlayer
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.tinker import TinkerEngine, ToolrollGroup, to_datums

pytest.importorskip("tinker", reason="tinker is not installed")
pytest.importorskip("tinker_cookbook.rl.rollouts", reason="tinker-cookbook is not installed")

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # tinker's, of what it deprecates


async def in_order(playing: same.World) -> list[same.Played]:
    oracle = await same.expected(playing)
    playing.engine.log.clear()
    return [oracle[index] for index in same.EPISODES]


# --- tinker-cookbook ------------------------------------------------------------------------------


def group_of(playing: Any, index: int = same.EPISODES[0], size: int = 1, **given: Any) -> Any:
    settings = EpisodeSettings(**{**playing.settings, "context_length": 8192, **given})
    return ToolrollGroup(DrivenPlayer(playing.tokenizer, settings), index, size)


async def rollout(playing: same.World, group: ToolrollGroup) -> Any:
    """tinker-cookbook's rollout of a group."""
    completers: Any = import_module("tinker_cookbook.completers")
    client = SamplingClient(playing.engine.url)
    policy = completers.TinkerTokenCompleter(client, max_tokens=same.MAX_NEW)
    return await import_module("tinker_cookbook.rl.rollouts").do_group_rollout(group, policy)


@pytest.mark.parametrize("history", ["kept", "forks"])
async def test_the_data_are_what_was_served_and_sampled(history: str, tmp_path: Path) -> None:
    """With tinker's own client, and as the cookbook makes them of its rollouts."""
    to_data = import_module("tinker_cookbook.rl.data_processing").trajectory_to_data
    async with same.world(history, tmp_path) as playing:
        assert await same.with_tinker(playing) == await in_order(playing)
        player = group_of(playing).player
        groups = [ToolrollGroup(player, index, 1) for index in same.EPISODES]
        rollouts = await asyncio.gather(*(rollout(playing, group) for group in groups))
        oracle = await in_order(playing)
    played = []
    for group in rollouts:
        [reward], [trajectory] = group.get_total_rewards(), group.trajectories_G
        played.append(same.Played(list(map(same.of_datum, to_data(trajectory, 1.0))), reward))
    assert played == oracle
    assert {group.trajectories_G[0].stop_reason for group in rollouts} == {"completed"}


async def test_a_group(tmp_path: Path) -> None:
    """Four episodes of one task, which `cleanup` closes, and a retry's."""
    async with same.world("kept", tmp_path) as playing:
        group = group_of(playing, size=4)
        played = await rollout(playing, pickle.loads(pickle.dumps(group)))
        assert len(played.trajectories_G) == 4 and len(set(played.get_total_rewards())) == 1
        [env, *_], again = await group.make_envs(), await group.make_envs()
        observation, stop = await env.initial_observation()
        assert observation.to_ints() == played.trajectories_G[0].transitions[0].ob.to_ints()
        assert stop == [playing.tokenizer.eos_token_id] and len(again) == 4
        assert len(pickle.dumps(group)) and group.logging_tags() == ["desk"]
        assert await group.compute_group_rewards([None], []) == [(0.0, {})]
        await group.cleanup()
        await group.cleanup()
    with pytest.raises(asyncio.CancelledError):
        _ = env.episode.result


async def test_what_must_not_be_trained_is_an_error(tmp_path: Path) -> None:
    """Also with a strategy that tries again: the group is left out."""
    async with same.world("kept", tmp_path) as playing:
        with pytest.raises(RolloutError, match=r"must not be trained \(invalid call\)"):
            for index in same.EPISODES:
                await rollout(playing, group_of(playing, index, agent_args={"mask_invalid": True}))
        env, *_ = await group_of(playing).make_envs()
        await env.initial_observation()
        with pytest.raises(RolloutError, match=r"aborted: .*the model's vocabulary"):
            await env.step([10**6])


async def test_a_prompt_that_is_too_long_and_a_cut_turn_end_an_episode(tmp_path: Path) -> None:
    """The cut turn's last token may even be a stop token: the sampler's reason counts."""
    async with same.world("kept", tmp_path) as playing:
        played = await rollout(playing, group_of(playing, 0, size=2, context_length=16))
        assert playing.engine.log == []
        assert played.get_total_rewards() == [0.0, 0.0]
        assert {one.stop_reason for one in played.trajectories_G} == {"context_overflow"}
        env, *_ = await group_of(playing).make_envs()
        _, stop = await env.initial_observation()
        done = await env.step([65, *stop], extra={"stop_reason": "length"})
    assert (done.episode_done, done.metrics["stop/max_tokens"]) == (True, 1.0)


# --- tinker ---------------------------------------------------------------------------------------

REQUEST = GenerateRequest(
    np.array([1, 2], dtype=np.int32), {"max_new_tokens": 8, "stop_token_ids": [9]}, "session"
)


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
    engine = TinkerEngine(client, Vocabulary(10), context_length=64)
    more = {"sampling_seed": 3, "top_k": 5, "top_p": 0.9, "temperature": 0.7}
    params = {**REQUEST.sampling_params, **more}
    turn = await engine.generate(GenerateRequest(REQUEST.input_ids, params, "session"))
    assert turn.output_ids.tolist() == [3, 9] and (turn.finish_reason, turn.matched) == ("stop", 9)
    assert turn.logprobs is not None and turn.logprobs.tolist() == [-1.0, -2.0]
    sent = seen["sampling_params"].model_dump(exclude_unset=True)
    assert sent == {
        "max_tokens": 8, "stop": [9], "seed": 3, "top_k": 5, "top_p": 0.9, "temperature": 0.7,
    }  # fmt: skip
    assert seen["prompt"].to_ints() == [1, 2]


async def test_the_example_of_the_page() -> None:
    """A turn without logprobs is refused."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tinker.md").read_text(), re.S)
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "tinker.md", "exec"), page)
    tokenizer = load_embedded_tokenizer()
    async with EmbeddedEngine(tokenizer, plays_the_reference) as engine:
        client = SamplingClient(engine.url)
        player = page["make_player"](None, tokenizer)
        datums = await page["data"](player, client, 0)
        await player.aclose()
        without = SamplingClient(engine.url, without_logprobs=True)
        with pytest.raises(CompletionError, match="0 logprobs for"):
            await TinkerEngine(without, tokenizer, context_length=64).generate(REQUEST)
    assert len(datums) == 8
    ends = {tokenizer.eos_token_id}
    assert {tuple(params.stop) for params in client.seen} == {tuple(ends)}
    for datum in datums:
        ids, inputs = datum.model_input.to_ints(), inputs_of(datum)
        assert inputs["target_tokens"][:-1] == ids[1:]
        assert inputs["target_tokens"][-1] in ends
        assert {len(column) for column in inputs.values()} == {len(ids)}


async def test_what_tinker_does_not_have_is_refused() -> None:
    """tinker's `SamplingParams` would ignore it."""
    engine = TinkerEngine(None, Vocabulary(10), context_length=64)
    names = "min_p stop frequency_penalty presence_penalty repetition_penalty regex"
    for name in names.split():
        params = {**REQUEST.sampling_params, name: 0.5}
        with pytest.raises(UsageError, match=f"Tinker has no sampling parameter '{name}'"):
            await engine.generate(GenerateRequest(REQUEST.input_ids, params, "session"))
    extra = {"lora_path": "a", "top_logprobs_num": 5}
    with pytest.raises(UsageError, match="Tinker has no lora_path, top_logprobs_num"):
        await engine.generate(replace(REQUEST, extra=extra))


# --- to_datums ------------------------------------------------------------------------------------


def inputs_of(datum: Any) -> dict[str, list[float]]:
    return {name: column.tolist() for name, column in datum.loss_fn_inputs.items()}


def test_a_datum_is_shifted_by_one_token() -> None:
    """An aborted episode has none."""
    assert to_datums(episode(None), None) == []
    (datum,) = to_datums(episode(1.0), 0.5)
    trained = [*range(4, 8), *range(10, 16)]
    assert datum.model_input.to_ints() == [*range(15)]
    assert inputs_of(datum) == {
        "target_tokens": [*range(1, 16)],
        "logprobs": [-1.0 if i in trained else 0.0 for i in range(1, 16)],
        "advantages": [0.5 if i in trained else 0.0 for i in range(1, 16)],
    }
    (other,) = to_datums(episode(1.0), 1.0, loss_fn="cross_entropy")
    assert inputs_of(other) == {
        "target_tokens": [*range(1, 16)],
        "weights": [float(i in trained) for i in range(1, 16)],
    }


def test_an_aborted_episode_has_none_and_logprobs_are_needed() -> None:
    assert to_datums(episode(None), None) == []
    result = episode(1.0)
    with pytest.raises(UsageError, match="the value is None"):
        to_datums(result, None)
    result.trajectories[0].logprobs[11] = np.nan
    with pytest.raises(TokenError, match="1 trained tokens have no logprob"):
        to_datums(result, 1.0)
