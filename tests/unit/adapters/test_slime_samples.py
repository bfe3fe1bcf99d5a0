"""The slime adapter's `generate` against slime's own types where it is installed (`peers`), and
against a mirror of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import slime_mirror
from support.http import router_over
from support.slime_mirror import train_data
from support.slime_trainer import (
    SAMPLING,
    every_sampled_token_is_as_served,
    real_slime,
    reference_lines,
    says,
    serving,
)

from toolroll.agents.trainable_agents import TrainableToolCallingAgent
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import InteractionResult, Status, StopReason, Trajectory
from toolroll.testing import (
    Fault,
    PolicyRequest,
    Reply,
    embedded_tokenizer_path,
)
from toolroll.trainers import slime
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.slime import generate, keep_group, read_settings, to_samples
from toolroll.trainers.slime.player import Player

# --- generate -------------------------------------------------------------------------------------


async def test_the_samples_of_a_group_of_slime_share_a_key(sample_type: Any) -> None:
    numbers = {"a": (3, 13), "b": (3, 14), "c": (4, 16), "d": (None, 17)}
    async with serving() as (engine, args), router_over(engine.url) as url:
        args.sglang_router_port, args.toolroll_affinity = int(url.rpartition(":")[2]), 4
        for session, (group, index) in numbers.items():
            sample = sample_type(index=index, group_index=group, prompt="0", session_id=session)
            assert (await generate(args, sample, dict(SAMPLING))).session_id == session
    keys = list(dict.fromkeys(entry.routing_key for entry in engine.log if entry.output_ids))
    assert keys == ["group 3/3", "group 4/4", "d"]


async def test_a_sample_holds_what_was_served_and_sampled(sample_type: Any) -> None:
    async with serving() as (engine, args):
        asked = sample_type(
            index=5, group_index=1, prompt="0", label="L", metadata={"kept": 1}, session_id="s"
        )
        made = await generate(args, asked, dict(SAMPLING))
    assert made.status is sample_type.Status.COMPLETED and made.reward == 1.0
    assert (made.index, made.group_index, made.rollout_id, made.label, made.session_id) == (
        5,
        1,
        None,
        "L",
        "s",
    )
    assert made.metadata["kept"] == 1 and made.metadata["toolroll"]["stop_reason"] == "done"
    train_data([made])
    turns = [entry for entry in engine.log if entry.output_ids]
    assert len(turns) > 2 and {entry.routing_key for entry in turns} == {"s"}
    last = [*turns[-1].input_ids.tolist(), *turns[-1].output_ids]
    assert made.tokens == last
    cut = len(last) - made.response_length
    assert cut == len(turns[0].input_ids)
    every_sampled_token_is_as_served([Namespace(samples=[[made]])], engine)
    assert sum(made.loss_mask) == sum(len(turn.output_ids) for turn in turns)
    assert made.weight_versions == ["default"] * len(turns)
    assert made.prefix_cache_info.total_prompt_tokens == sum(len(turn.input_ids) for turn in turns)
    assert (
        asked.tokens == []
        and asked.reward is None
        and asked.prefix_cache_info.total_prompt_tokens == 0
    ), "the sample given was changed"


FILE = """
from toolroll import tool_environment

def make(word: str):
    task = {"prompt": "Say something.", "word": word}
    return tool_environment(
        tools=[], tasks=[task], reward=lambda task, final: float(task["word"] in final)
    )
"""


@pytest.mark.parametrize(("word", "reward"), [("o", 1.0), ("absent", 0.0)])
async def test_an_environment_of_a_file_is_played_with_its_arguments(
    sample_type: Any, tmp_path: Path, word: str, reward: float
) -> None:
    (tmp_path / "say.py").write_text(FILE)
    async with serving() as (_, args):
        args.toolroll_env = f"{tmp_path / 'say.py'}:make"
        args.toolroll_env_args = {"word": word}
        made = await generate(args, sample_type(prompt=0), dict(SAMPLING))
        assert made.reward == reward
        args.toolroll_env_args = {"wort": word}
        with pytest.raises(UsageError, match="there is no argument 'wort'; did you mean 'word'"):
            await generate(args, sample_type(prompt=0), dict(SAMPLING))


async def test_both_arities_and_evaluation(sample_type: Any) -> None:
    # slime passes evaluation by keyword, if the signature has it; miles calls with three arguments.
    assert "evaluation" in inspect.signature(generate).parameters
    async with serving() as (_, args):
        three = await generate(args, sample_type(prompt=0), dict(SAMPLING))
        four = await generate(args, sample_type(prompt=0), dict(SAMPLING), evaluation=True)
    assert three.reward == four.reward == 1.0


async def test_an_episode_that_failed_has_no_reward_and_a_zero_mask(sample_type: Any) -> None:
    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(status=400, body=b"no") if request.call == 1 else None

    async with serving(faults=faults) as (engine, args):
        args.toolroll_reruns = 0
        made = await generate(args, sample_type(prompt=0, index=1), dict(SAMPLING))
        args.toolroll_reruns = 1
        again = await generate(
            args, sample_type(prompt=0, index=1, session_id="other"), dict(SAMPLING)
        )
    assert (
        made.status is again.status is sample_type.Status.ABORTED
        and made.reward is None
        and made.remove_sample
    )
    assert (
        set(made.loss_mask) == {0}
        and len(made.loss_mask) == made.response_length == len(made.rollout_log_probs) > 1
    )
    assert made.metadata["toolroll"]["error"]["type"] == "EngineError"
    assert [entry.status for entry in engine.log if entry.routing_key == "other"].count(400) == 2, (
        "it was to be played once more"
    )


async def test_a_failure_before_the_first_token_still_makes_a_sample(sample_type: Any) -> None:
    async with serving(faults=lambda request: Fault(status=400)) as (engine, args):
        made = await generate(args, sample_type(prompt=0), dict(SAMPLING))
    assert made.response_length == 1 and made.loss_mask == [0] and made.rollout_log_probs == [0.0]
    assert made.tokens == engine.log[0].input_ids.tolist()
    nothing = InteractionResult(
        "", None, [], {}, status=Status.ABORTED, stop_reason=StopReason.USER_ERROR
    )
    [made] = to_samples(sample_type(index=0), nothing, filler=7)
    assert (made.tokens, made.response_length, made.loss_mask, made.remove_sample) == (
        [7, 7],
        1,
        [0],
        True,
    )


async def test_an_agent_with_its_own_call_llm_is_stopped_too(sample_type: Any) -> None:
    """Its requests are sent with `post`, not with `generate`."""

    class Calling(TrainableToolCallingAgent):
        async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
            return await super()._call_llm(url, payload)

    stopped = [False]

    def policy(request: PolicyRequest) -> str:
        stopped[0] = request.call == 1
        return reference_lines(0)[request.call]

    async with serving(policy) as (engine, args):
        player = Player(args, read_settings(args))
        player._episodes._make_agent = lambda model, settings: Calling(model=model)
        params = {"max_new_tokens": 256}
        asked = sample_type(prompt=0, index=0)
        [made] = await player.play(asked, params, stopped=lambda: stopped[0])
        await player.aclose()
    assert made.status is sample_type.Status.ABORTED and made.reward is None
    assert made.metadata["toolroll"]["stop_reason"] == "engine_abort"
    assert len(engine.log) == 2


@pytest.mark.parametrize("stopping", [False, True])
async def test_an_aborted_turn_is_resumed_unless_slime_stops_its_rollout(
    sample_type: Any, monkeypatch: pytest.MonkeyPatch, stopping: bool
) -> None:
    state = slime_mirror.install_loop(monkeypatch)

    def faults(request: PolicyRequest) -> Fault | None:
        state.aborted = stopping
        return Fault(abort_after=3) if request.index == 0 else None

    async with serving(faults=faults) as (engine, args):
        args.toolroll_max_resumes = 1
        made = await generate(args, sample_type(prompt=0), dict(SAMPLING))
    first, *rest = engine.log
    if stopping:
        assert made.status is sample_type.Status.ABORTED and rest == []
    else:
        assert made.reward == 1.0
        assert rest[0].input_ids.tolist() == [*first.input_ids.tolist(), *first.output_ids]


async def test_a_response_is_refused_or_begun_anew(sample_type: Any) -> None:
    """slime's fully asynchronous rollout passes an aborted sample again, as `generate` gave it."""
    failing: list[bool] = []

    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(abort_after=3) if failing and failing.pop() else None

    async with serving(faults=faults) as (_, args):
        begun = sample_type(prompt=0, index=3, response="Hello", response_length=1, tokens=[1, 2])
        with pytest.raises(UsageError, match="sample 3 already has a response of 1 tokens"):
            await generate(args, begun, dict(SAMPLING))
        args.toolroll_partial = "restart"
        for partial in (True, False):
            args.partial_rollout = partial
            failing.append(True)
            asked = sample_type(prompt=0, index=3, metadata={"a": 1})
            cut = await generate(args, asked, dict(SAMPLING))
            assert cut.status is sample_type.Status.ABORTED and cut.reward is None
            assert not any(cut.loss_mask) and cut.remove_sample and len(cut) == 1
            cut.session_id = None  # the test's policy counts the turns of a session
            again = await generate(args, cut, dict(SAMPLING))
            assert again.reward == 1.0 and any(again.loss_mask) and not again.remove_sample
            assert again.metadata["a"] == 1 and again.index == 3
            assert again.metadata["toolroll"]["metrics"]["restarts"] == 1
            train_data(again)


def _trajectory(
    n: int, cut: int, *, reason: str | None = None, source: Any = "engine"
) -> Trajectory:
    mask = np.array([0] * cut + [1] * (n - cut), dtype=np.int32)
    logprobs = np.where(mask == 1, -0.5, np.nan).astype(np.float32)
    return Trajectory(np.arange(n, dtype=np.int32), mask, logprobs, (), cut, source, reason)


def test_forks_are_siblings_with_one_rollout_id(sample_type: Any) -> None:
    paths = (_trajectory(6, 3), _trajectory(9, 5, reason="the template rewrote history"))
    result = InteractionResult(
        "", 1.0, [], {}, trajectories=paths, metrics={"prompt_tokens": 10.0, "cached_tokens": 4.0}
    )
    asked = sample_type(index=17, group_index=2, prompt="4")
    first, second = to_samples(asked, result)
    assert (
        first.rollout_id == second.rollout_id == 17 and first.group_index == second.group_index == 2
    )
    assert (first.response_length, second.response_length) == (
        3,
        4,
    ) and first.reward == second.reward == 1.0
    assert second.rollout_log_probs == [-0.5] * 4
    assert [sample.prefix_cache_info.total_prompt_tokens for sample in (first, second)] == [10, 0]
    assert to_samples(sample_type(index=17, rollout_id=99), result)[1].rollout_id == 99
    [alone] = to_samples(asked, dataclasses.replace(result, trajectories=paths[:1]))
    assert alone.rollout_id is None
    with pytest.raises(UsageError, match="neither rollout_id nor index"):
        to_samples(sample_type(), result)


def test_what_may_not_be_trained_is_not(sample_type: Any) -> None:
    excluded = dataclasses.replace(_trajectory(6, 3), loss_mask=np.zeros(6, dtype=np.int32))
    [made] = to_samples(
        sample_type(index=0), InteractionResult("", 1.0, [], {}, trajectories=(excluded,))
    )
    assert made.remove_sample and made.reward == 1.0
    counted = made.prefix_cache_info
    assert (counted.cached_tokens, counted.total_prompt_tokens) == (0, 0), "without metrics"
    text = _trajectory(6, 3, source="transcript")
    with pytest.raises(UsageError, match="transcript"):
        to_samples(sample_type(index=0), InteractionResult("", 1.0, [], {}, trajectories=(text,)))


def test_a_reward_key_is_kept(sample_type: Any) -> None:
    [made] = to_samples(
        sample_type(index=0),
        InteractionResult("", 0.5, [], {}, trajectories=(_trajectory(6, 3),)),
        reward_key="score",
    )
    assert made.get_reward_value(Namespace(reward_key="score")) == 0.5


# --- settings -------------------------------------------------------------------------------------


async def test_limits_and_the_collector_are_settings() -> None:
    async with serving() as (_, args):
        by_default = Player(args, read_settings(args))
        await by_default.aclose()
        vars(args).update(toolroll_engine_timeout=9, toolroll_pace_gc=False)
        vars(args).update(toolroll_step_timeout=7, toolroll_max_observation_bytes=50)
        player = Player(args, read_settings(args))
        await player.aclose()
    found = [(*limits_of(one), one.model.args.pace_gc) for one in (by_default, player)]  # type: ignore[union-attr]
    assert found == [(0.0, None, 1_000_000, True), (9.0, 7.0, 50, False)]


def limits_of(player: Player) -> tuple[Any, ...]:
    """Return the limits of the player's engine and of the agents that it makes."""
    agent = player._episodes._make_agent(player.model, player.settings.agent_settings)
    engine = player.model.engine
    return (
        engine.config.engine_timeout,  # type: ignore[attr-defined]
        agent.step_timeout,
        agent.rollout_args["max_observation_bytes"],
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"toolroll_evn": "desk"}, "did you mean 'toolroll_env'"),
        ({"toolroll_max_turns": 0}, "toolroll_max_turns"),
        ({"toolroll_history": "keep"}, "toolroll_history"),
        (
            {"toolroll_zzz": 1},
            "there are toolroll_affinity, toolroll_agent, toolroll_agent_args",
        ),
        ({"toolroll_env": None}, "no environment is named"),
        ({"toolroll_env": "dask"}, "did you mean 'desk'"),
        ({"toolroll_user_settings": {"model": "m"}}, "toolroll_user does not say"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p"),
    ],
)
async def test_settings_that_cannot_work_are_refused_in_words(
    sample_type: Any, given: dict[str, Any], words: str
) -> None:
    async with serving() as (engine, args):
        vars(args).update(given)
        with pytest.raises(UsageError, match=words):
            await generate(args, sample_type(prompt=0), dict(SAMPLING))
        assert engine.log == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("hello", "--input-key index"),
        ([{"role": "user"}], "--input-key"),
        (999, "has tasks 0 to 32"),
        (-1, "tasks 0"),
    ],
)
async def test_prompts_that_are_no_task_are_refused(
    sample_type: Any, prompt: Any, words: str
) -> None:
    async with serving() as (_, args):
        with pytest.raises(UsageError, match=words):
            await generate(args, sample_type(prompt=prompt), dict(SAMPLING))


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "slime.md").read_text(encoding="utf-8")
    for name in slime.SlimeSettings.model_fields.keys() - EpisodeSettings.model_fields.keys():
        assert f"`toolroll_{name}`" in page, name  # docs/settings.md has the others
    assert read_settings(Namespace(toolroll_env="desk", other=1)).env == "desk"


# --- slime's own checks and loop ------------------------------------------------------------------


@pytest.mark.peers
async def test_slime_s_own_checks_accept_our_samples() -> None:
    real = real_slime("slime.utils.types").Sample
    async with serving() as (_, args):
        made = await generate(args, real(prompt=0, index=0), dict(SAMPLING))
    made._validate_response_metadata_lengths()
    assert real.from_dict(json.loads(json.dumps(made.to_dict()))).tokens == made.tokens
    # what slime adds to it later still fits
    made.append_response_tokens(tokens=[1, 2], trainable=False)


@pytest.mark.peers
async def test_slime_s_own_loop_plays_our_generate(slime_loop: Any) -> None:
    """Groups as slime begins them, with a weight update in the middle of one, and what it makes
    of an aborted episode.
    """
    sample, filters = (
        real_slime("slime.utils.types").Sample,
        real_slime("slime.rollout.filter_hub.base_types"),
    )

    def policy(request: PolicyRequest) -> str | Reply:
        gives_up = request.routing_key[-1] in "13"
        return "I cannot help you. Goodbye." if gives_up else says()(request)

    def faults(request: PolicyRequest) -> Fault | None:
        if request.routing_key == "g1-3":
            return Fault(status=400)
        return (
            Fault(weight_version="2", switch_after=4)
            if request.routing_key == "g0-0" and request.call == 1
            else None
        )

    async with serving(policy, faults=faults, weight_version="1") as (engine, args):
        vars(args).update(
            hf_checkpoint=str(embedded_tokenizer_path()),
            custom_generate_function_path="toolroll.trainers.slime.generate",
            rollout_skip_special_tokens=False,
            mask_offpolicy_in_partial_rollout=False,
            custom_rm_path=None,
            sglang_dp_size=None,
        )
        groups = [
            [sample(prompt=0, index=4 * g + at, session_id=f"g{g}-{at}") for at in range(4)]
            for g in range(2)
        ]
        params = slime_loop.GenerateState(args).sampling_params
        played = await asyncio.gather(
            *(slime_loop.generate_and_rm_group(args, group, dict(params)) for group in groups)
        )
    first, second = played
    assert [made.reward for made in first] == [1.0, 0.0, 1.0, 0.0] and first[0].weight_versions[
        :3
    ] == ["1", "1", "2"]
    train_data(list(first))
    assert (
        second[3].status is sample.Status.ABORTED
        and second[3].reward is None
        and not any(second[3].loss_mask)
    )
    kept = [filters.call_dynamic_filter(keep_group, args, list(group)).keep for group in played]
    assert kept == [True, False]
    output = Namespace(samples=[list(first)])
    every_sampled_token_is_as_served([output], engine)
