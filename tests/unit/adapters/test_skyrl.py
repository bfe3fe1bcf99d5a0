"""The SkyRL adapter with SkyRL's types (0.3.0)."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from support.forked_episodes import result_of
from support.framework_engines import (
    GeneratorConfig,
    SkyrlChatTemplate,
    SkyrlClient,
    SkyrlInference,
    TrajectoryID,
)
from support.qwen import tokenizer_for, trl_template
from support.slime_trainer import plays_the_reference, reference_line

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Status, Trajectory, Turn
from toolroll.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.sequences import select_sequences, training_sequences
from toolroll.trainers.skyrl import ToolrollGenerator
from toolroll.trainers.skyrl.generator import token_rewards

SETTINGS = EpisodeSettings(env="desk", parser="hermes", verify="always", max_turns=12, reruns=0)


@asynccontextmanager
async def generator(
    *, settings: EpisodeSettings = SETTINGS, lora: str | None = None, **config: Any
) -> AsyncIterator[tuple[ToolrollGenerator, SkyrlClient]]:
    tokenizer = load_embedded_tokenizer()
    async with EmbeddedEngine(tokenizer, plays_the_reference) as engine:
        client = SkyrlClient(engine.url, uses_lora_weight_sync=lora is not None)
        own = ToolrollGenerator(
            GeneratorConfig(**config), tokenizer, client, settings, policy_model_name=lora
        )
        yield own, client
        await own.aclose()


def batch(count: int = 2, **extras: Any) -> dict[str, Any]:
    return {
        "prompts": [[{"role": "user", "content": "A task."}]] * count,
        "env_classes": ["desk"] * count,
        "env_extras": [{"index": 0, **extras}] * count,
        "sampling_params": {
            "max_tokens": 256, "temperature": 1.0, "logprobs": 1, "skip_special_tokens": True,
        },
        "trajectory_ids": [TrajectoryID("0", i) for i in range(count)],
        "batch_metadata": None,
    }  # fmt: skip


async def test_all_fields_of_the_output_are_filled() -> None:
    async with generator() as (own, client):
        output = await own.generate(batch())
    rows = zip(
        output["response_ids"], output["loss_masks"], output["rollout_logprobs"], output["rewards"],
        strict=True,
    )  # fmt: skip
    for ids, mask, logprobs, rewards in rows:
        assert len(ids) == len(mask) == len(logprobs) == len(rewards) > sum(mask) > 0
        assert rewards[-1] == sum(rewards) == 1.0
    assert output["stop_reasons"] == ["stop", "stop"]
    assert [each.repetition_id for each in output["trajectory_ids"]] == [0, 1]
    assert output["rollout_metrics"]["toolroll/aborted"] == 0.0
    assert len(output["env_metrics"]) == len(output["trajectory_generation_times"]) == 2
    assert {seen["sampling_params"]["logprobs"] for seen in client.seen} == {1}
    assert {seen["cache_salt"] for seen in client.seen} == {"toolroll-0"}
    assert len({seen["session_ids"][0] for seen in client.seen}) == 2


async def test_a_first_prompt_that_is_too_long_is_masked() -> None:
    settings = SETTINGS.model_copy(update={"context_length": 16})
    async with generator(settings=settings) as (own, client):
        output = await own.generate(batch())
    assert output["stop_reasons"] == ["length", "length"] and not client.seen
    assert [sum(mask) for mask in output["loss_masks"]] == [0, 0]
    assert all(len(ids) >= 1 for ids in output["response_ids"] + output["prompt_token_ids"])


async def test_an_aborted_episode_leaves_the_group_s_mean() -> None:
    """SkyRL's baseline is the mean of the group: 0.0 for an aborted episode would lower it."""
    async with generator() as (own, client):
        ask = batch(3)
        ask["trajectory_ids"] = [TrajectoryID(name, 0) for name in ("a", "a", "b")]
        answers = client.generate

        async def failing(given: dict[str, Any]) -> Any:
            answer = await answers(given)
            if given["session_ids"] == client.seen[0]["session_ids"]:
                answer["response_logprobs"] = None
            return answer

        client.generate = failing  # type: ignore[method-assign, assignment]
        output = await own.generate(ask)
    assert output["stop_reasons"] == ["abort", "stop", "stop"]
    assert sum(output["loss_masks"][0]) == 0 and sum(output["rewards"][0]) == 1.0
    assert output["rollout_metrics"]["toolroll/aborted"] == 1.0


async def test_an_aborted_episode_gets_the_mean_of_what_is_trained() -> None:
    """The rewards of cut episodes are set to 0 before the group's mean is taken."""
    async with generator(zero_reward_on_non_stop=True) as (own, _):
        result, sequences = await own._play(batch(1), 0, batch(1)["sampling_params"])
        cut = replace(result, status=Status.TRUNCATED, reward=1.0)
        aborted = replace(result, status=Status.ABORTED, reward=None)
        ask = {"trajectory_ids": [TrajectoryID("a", i) for i in range(2)]}
        output = own._output([(cut, sequences), (aborted, sequences)], ask, with_logprobs=True)
    assert [sum(rewards) for rewards in output["rewards"]] == [0.0, 0.0]


async def test_the_trainer_s_filters_are_applied() -> None:
    settings = SETTINGS.model_copy(update={"max_turns": 1})
    own: Any
    async with generator(
        settings=settings, apply_overlong_filtering=True, zero_reward_on_non_stop=True
    ) as (own, _):
        output = await own.generate(batch(1))
    assert output["stop_reasons"] == ["length"] and not any(output["loss_masks"][0])
    assert not any(output["rewards"][0])


async def test_max_turns_and_limits_are_skyrl_s() -> None:
    settings = EpisodeSettings(env="desk", parser="hermes")
    async with generator(settings=settings, max_turns=2) as (own, client):
        ask = batch(1)
        ask["sampling_params"] = None
        output = await own.generate(ask)
    assert output["stop_reasons"] == ["length"] and len(client.seen) == 2
    assert client.seen[0]["sampling_params"]["max_tokens"] == 1024


async def test_each_request_names_the_lora_adapter() -> None:
    """SkyRL's client refuses requests without `model` if the trainer updates a LoRA adapter."""
    async with generator(lora="skyrl-lora") as (own, client):
        output = await own.generate(batch(1))
    assert output["stop_reasons"] == ["stop"] and set(client.models) == {"skyrl-lora"}
    assert {seen["cache_salt"] for seen in client.seen} == {"toolroll-skyrl-lora@0"}
    with pytest.raises(UsageError, match=r"policy_model_name=resolve_policy_model_name\(cfg\)"):
        ToolrollGenerator(GeneratorConfig(), load_embedded_tokenizer(), client, SETTINGS)


@dataclass
class NewerConfig(GeneratorConfig):
    novelty: int = 0


@pytest.mark.parametrize(("name", "value"), [
    ("vision_language_generator", True), ("batched", True), ("use_conversation_multi_turn", False),
    ("chat_template", SkyrlChatTemplate(name_or_path="qwen3_with_thinking")), ("novelty", 1),
    ("inference_engine", SkyrlInference(enable_return_sample_support_set=True)),
])  # fmt: skip
def test_a_setting_that_may_not_be_harmless_is_refused(name: str, value: Any) -> None:
    config, tokenizer = NewerConfig(**{name: value}), load_embedded_tokenizer()
    inner = ".enable_return_sample_support_set" if name == "inference_engine" else ""
    with pytest.raises(UsageError, match=rf"generator\.{name}{inner} is .* not supported"):
        ToolrollGenerator(config, tokenizer, SkyrlClient(""), SETTINGS)


async def test_step_wise_trajectories_need_trajectory_ids() -> None:
    async with generator(step_wise_trajectories=True) as (own, _):
        with pytest.raises(UsageError, match="needs trajectory_ids"):
            await own.generate({**batch(1), "trajectory_ids": None})


def thinks(request: PolicyRequest) -> str:
    """The reference of task 0, each turn with a thought, which Qwen3's template takes out later."""
    turn = request.text.count("<|im_start|>assistant") - 1
    return "<think>Hm.</think>" + reference_line(0, turn)


async def forked(**config: Any) -> tuple[dict[str, Any], int]:
    """The output for a prompt whose episode forks, and the number of sampled tokens."""
    tokenizer: Any = tokenizer_for(trl_template("qwen3"))
    async with EmbeddedEngine(tokenizer, thinks) as engine:
        own = ToolrollGenerator(
            GeneratorConfig(**config), tokenizer, SkyrlClient(engine.url), SETTINGS
        )
        output = await own.generate(batch(1))
        await own.aclose()
        return output, sum(len(entry.output_ids) for entry in engine.log)


async def test_of_a_fork_all_or_the_most_trained_sequences_are_given() -> None:
    output, sampled = await forked(step_wise_trajectories=True, merge_stepwise_output=True)
    rows = len(output["response_ids"])
    assert rows > 1 and sum(map(sum, output["loss_masks"])) == sampled
    assert output["is_last_step"] == [False] * (rows - 1) + [True]
    assert {each.repetition_id for each in output["trajectory_ids"]} == {0}
    assert not any(map(any, output["rewards"][:-1])) and output["rewards"][-1][-1] == 1.0
    assert output["rollout_metrics"]["toolroll/delivered_share"] == 1.0
    assert {len(output[name]) for name in ("env_metrics", "trajectory_generation_times")} == {rows}
    output, sampled = await forked()
    (trained,), metrics = map(sum, output["loss_masks"]), output["rollout_metrics"]
    assert 0 < metrics["toolroll/left_out_tokens"] == sampled - trained
    assert output["rewards"][0][-1] == sum(output["rewards"][0])
    assert metrics["toolroll/delivered_share"] == trained / sampled


def episode_of(
    mask: list[int],
    turns: Sequence[Turn],
    reward: float,
    step_rewards: Sequence[float] = (),
    start: int = 2,
) -> InteractionResult:
    """An episode of one sequence, whose prompt ends at `start`."""
    trained = np.array(mask, np.int32)
    logprobs = np.where(trained == 1, -1.0, np.nan).astype(np.float32)
    ids = np.arange(len(mask), dtype=np.int32)
    whole = Trajectory(ids, trained, logprobs, tuple(turns), start)
    return result_of(reward, whole, step_rewards=tuple(step_rewards))


def rewards_of(
    *given: float, reward: float, excluded: str | None = None, fork: bool = False
) -> list[float]:
    """The rewards of the response's tokens. `given` are those of its two turns, of which the first
    may be `excluded`; a `fork` has its first turn's reward in another sequence.
    """
    turns = (Turn(2, 4, "stop", excluded=excluded, reward=given[0]), Turn(5, 7, "stop"))
    turns = (turns[0], replace(turns[1], reward=given[1]))
    mask = [0, 0, *([0, 0] if excluded else [1, 1]), 0, 1, 1]
    result = episode_of(mask, turns, reward, given, start=5 if fork else 2)
    (sequence,) = training_sequences(result)
    return token_rewards(sequence, reward)


def test_rewards_are_at_the_last_tokens_of_their_turns() -> None:
    """Those that belong to other tokens are at the last one."""
    assert rewards_of(0.25, 0.5, reward=0.75) == [0.0, 0.25, 0.0, 0.0, 0.5]
    assert rewards_of(0.25, 0.5, reward=0.5) == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert rewards_of(0.0, 1.0, reward=1.0) == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert rewards_of(0.1, 0.2, reward=0.3) == [0.0, 0.1, 0.0, 0.0, 0.2]
    assert rewards_of(float("nan"), 0.5, reward=0.5) == [0.0, 0.0, 0.0, 0.0, 0.5]
    # they were matched by count: as many steps as turns, but not the same ones
    assert rewards_of(0.25, 0.5, reward=0.75, excluded="invalid call")[-1] == 0.75
    context = rewards_of(0.0, 0.5, reward=0.75, excluded="context", fork=True)
    assert context == [0.0, 0.75]


def test_turns_without_a_step_or_a_token_do_not_move_rewards() -> None:
    """There are as many steps as turns, but the first turn has no step, and the last has two; and
    an empty turn after the trained tokens gets no reward.
    """
    rewarded = [Turn(3, 4, "stop", reward=0.2), Turn(4, 5, "stop", reward=0.3)]
    result = episode_of([0, 0, 1, 1, 1], [Turn(2, 3, "stop"), *rewarded], 0.5, (0.2, 0.15, 0.15))
    (sequence,) = training_sequences(result)
    assert token_rewards(sequence, 0.5) == [0.0, 0.2, 0.3]
    turns = [Turn(2, 4, "stop", reward=0.25), Turn(6, 6, "length", reward=0.75)]
    episode = episode_of([0, 0, 1, 1, 0, 0, 0], turns, 1.0)
    [sequence] = select_sequences(episode, several=False)
    assert token_rewards(sequence, 1.0) == [0.0, 1.0]
