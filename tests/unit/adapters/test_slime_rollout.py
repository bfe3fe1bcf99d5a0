"""The slime adapter's `generate_rollout`: a trainer's loop and its evaluations."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from support.slime_mirror import (
    DataSource,
    eval_dataset,
    flattened,
    install_hooks,
    play_group,
    put_back,
    train_data,
)
from support.slime_trainer import (
    SAMPLING,
    every_sampled_token_is_as_served,
    forking,
    reference_lines,
    says,
    serving,
)

from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.testing import (
    Fault,
    PolicyRequest,
    Reply,
)
from toolroll.trainers.slime import (
    generate,
    generate_rollout,
    keep_group,
    training,
)

# --- generate_rollout: a trainer's loop -----------------------------------------------------------


async def test_a_trainer_s_loop_gets_consistent_samples(sample_type: Any, closing: None) -> None:
    """Two iterations, groups of 8, the weights updated in the middle of the first rollout."""

    def policy(request: PolicyRequest) -> str:
        group, at = map(int, request.routing_key.split("/"))
        lines = reference_lines(group % 2)
        if at % 2:  # half of each group give up at once
            return "I cannot help you. Goodbye."
        return lines[request.call] if request.call < len(lines) else "Goodbye."

    def faults(request: PolicyRequest) -> Fault | None:
        return (
            Fault(weight_version="2", switch_after=4)
            if request.routing_key == "0/0" and request.call == 1
            else None
        )

    async with serving(policy, faults=faults, weight_version="1") as (engine, args):
        args.dynamic_sampling_filter_path = "toolroll.trainers.slime.keep_group"
        source = DataSource(sample_type, [{"prompt": 0}, {"prompt": 1}], n=8)
        outputs = [await asyncio.to_thread(generate_rollout, args, 0, source)]
        engine.weight_version = "3"
        outputs.append(await asyncio.to_thread(generate_rollout, args, 1, source))
    for output in outputs:
        assert type(output).__name__ == "RolloutFnTrainOutput"
        assert [len(group) for group in output.samples] == [8, 8]
        train_data([sample for group in output.samples for sample in group])
        for group in output.samples:
            assert len({sample.group_index for sample in group}) == 1
            assert {sample.reward for sample in group} == {0.0, 1.0}
        indices = [sample.index for group in output.samples for sample in group]
        assert indices == sorted(indices)
    first = {sample.session_id: sample for group in outputs[0].samples for sample in group}
    assert first["0/0"].weight_versions[:3] == ["1", "1", "2"], (
        "a turn that saw the update has both versions"
    )
    assert outputs[0].metrics["toolroll/weight_version_staleness_max"] == 1.0
    assert outputs[0].metrics["toolroll/mixed_version_share"] > 0
    assert outputs[1].metrics["toolroll/weight_version_staleness_max"] == 0.0
    for name in (
        "turns",
        "invalid_calls",
        "tool_errors",
        "cached_share",
        "token_mismatches",
        "episodes",
        "aborted",
    ):
        assert f"toolroll/{name}" in outputs[0].metrics
    assert (
        outputs[0].metrics["toolroll/episodes"] == 16.0
        and outputs[0].metrics["toolroll/cached_share"] > 0.5
    )
    every_sampled_token_is_as_served(outputs, engine)


async def test_a_group_with_an_aborted_episode_is_replaced(sample_type: Any, closing: None) -> None:
    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(status=400) if request.routing_key == "1/1" else None

    async with serving(faults=faults) as (_, args):
        args.over_sampling_batch_size = 1
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        output = await asyncio.to_thread(generate_rollout, args, 0, source)
    assert [group[0].group_index for group in output.samples] == [0, 2]
    assert (
        output.metrics["rollout/dynamic_filter/drop_aborted"] == 1.0
        and output.metrics["toolroll/aborted"] == 1.0
    )


async def test_a_rollout_of_failures_ends_with_their_words(
    sample_type: Any, closing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_MOST_ABORTED", 3)
    async with serving(faults=lambda request: Fault(status=400, body=b"out of order")) as (_, args):
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        with pytest.raises(RolloutError, match=r"3 groups in a row.*EngineError"):
            await asyncio.to_thread(generate_rollout, args, 0, source)
        with pytest.raises(UsageError, match="--input-key index"):
            await asyncio.to_thread(
                generate_rollout, args, 0, DataSource(sample_type, [{"prompt": "x"}], n=2)
            )


async def test_what_is_over_when_the_batch_is_full_is_ended_at_the_engine(
    sample_type: Any, closing: None
) -> None:
    gate = asyncio.Event()

    async def policy(request: PolicyRequest) -> str:
        if request.routing_key.startswith("2/"):
            await gate.wait()  # never within the rollout
        return says()(request)

    async with serving(policy) as (engine, args):
        args.over_sampling_batch_size, args.partial_rollout, args.toolroll_partial = (
            3,
            True,
            "restart",
        )
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        output = await asyncio.to_thread(generate_rollout, args, 0, source)
        assert [group[0].group_index for group in output.samples] == [0, 1]
        [back] = source.buffer
        assert {sample.group_index for sample in back} == {2} and {
            sample.tokens == [] for sample in back
        } == {True}
        for _ in range(200):
            if all(entry.aborted for entry in engine.log if entry.routing_key.startswith("2/")):
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("requests of a cancelled group were left running")
        gate.set()
        args.over_sampling_batch_size = 2
        output = await asyncio.to_thread(generate_rollout, args, 1, source)
        assert [group[0].group_index for group in output.samples] == [2, 3]


async def test_evaluation_counts_graded_episodes_only(
    sample_type: Any, closing: None, tmp_path: Path
) -> None:
    rows = [{"index": at, "metadata": {"env": "desk", "split": "test"}} for at in (0, 1, 2)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    first: dict[str, int] = {}

    def policy(request: PolicyRequest) -> str | Reply:
        index = first.setdefault(request.routing_key, len(first) % 6) // 2
        lines = reference_lines(index)
        return lines[request.call] if request.call < len(lines) else "Goodbye."

    async with serving(policy) as (_, args):
        # one after another: sessions come in the order of the rows
        args.toolroll_concurrency, args.toolroll_env = 1, None
        args.eval_datasets = [
            eval_dataset("desk-three", str(tmp_path / "tasks.jsonl"), n_samples_per_eval_prompt=2)
        ]
        output = await asyncio.to_thread(generate_rollout, args, 0, None, evaluation=True)
    assert type(output).__name__ == "RolloutFnEvalOutput"
    data = output.data["desk-three"]
    assert data["rewards"] == [1.0] * 6 and data["truncated"] == [False] * 6
    assert [sample.index for sample in data["samples"]] == list(range(6))
    assert output.metrics["eval/desk-three/toolroll/aborted"] == 0.0


async def test_an_evaluation_of_failures_is_no_number(
    sample_type: Any, closing: None, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"index": 0}\n{"index": 1}\n', encoding="utf-8")
    failing = {"on": True}

    def faults(request: PolicyRequest) -> Fault | None:
        return (
            Fault(status=400)
            if failing["on"] or first.setdefault(request.routing_key, len(first)) == 0
            else None
        )

    first: dict[str, int] = {}
    async with serving(faults=faults) as (_, args):
        args.toolroll_concurrency, args.toolroll_reruns = 1, 0
        args.eval_datasets = [eval_dataset("d", str(path))]
        with pytest.raises(RolloutError, match="none of 2 episodes could be graded"):
            await asyncio.to_thread(generate_rollout, args, 0, None, evaluation=True)
        failing["on"] = False
        output = await asyncio.to_thread(generate_rollout, args, 0, None, evaluation=True)
        assert len(output.data["d"]["rewards"]) == len(output.data["d"]["samples"]) == 1
        assert output.metrics["eval/d/toolroll/aborted"] == 1.0
        for wrong, words in (
            ({"path": "/nowhere"}, "does not exist"),
            ({"input_key": "text"}, "no key 'text'"),
        ):
            args.eval_datasets = [dataclasses.replace(eval_dataset("d", str(path)), **wrong)]  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=words):
                await asyncio.to_thread(generate_rollout, args, 0, None, evaluation=True)


# --- forked episodes, seeds and hooks -------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "warnings"),
    [
        ({"advantage_estimator": "grpo"}, 1),
        ({"advantage_estimator": "ppo"}, 0),
        ({"advantage_estimator": "grpo", "rewards_normalization": False}, 0),
        ({"advantage_estimator": "grpo", "custom_reward_post_process_path": "mine.norm"}, 0),
    ],
)
async def test_a_fork_that_slime_would_normalize_wrongly_is_logged_once(
    sample_type: Any,
    closing: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, Any],
    warnings: int,
) -> None:
    training._warn_of_forks.cache_clear()
    async with forking(tmp_path) as (_, args):
        vars(args).update(given, rollout_batch_size=1, over_sampling_batch_size=1)
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        for at in (0, 1):
            output = await asyncio.to_thread(generate_rollout, args, at, source)
    [group] = output.samples
    assert [sample.index for sample in group] == [2] * (len(group) - 1) + [3] and len(group) > 2
    found = [one for one in caplog.messages if "--custom-reward-post-process-path" in one]
    assert len(found) == warnings


async def test_an_evaluation_of_slime_s_own_counts_a_forked_episode_once(
    sample_type: Any, tmp_path: Path
) -> None:
    async with forking(tmp_path) as (_, args):
        for evaluation in (False, True):
            asked = sample_type(index=0, prompt=0, session_id=f"{evaluation}/0")
            made = await generate(args, asked, dict(SAMPLING), evaluation=evaluation)
            assert isinstance(made, list) != evaluation
    assert made.reward == 1.0 and isinstance(made, sample_type)


async def test_forked_episodes_and_others_are_trained_in_one_batch(
    sample_type: Any, closing: None, tmp_path: Path
) -> None:
    """slime flattens a batch by the type of its first item, so a mixed batch ended the training."""
    async with forking(tmp_path) as (_, args):
        vars(args).update(rollout_batch_size=1, over_sampling_batch_size=1)
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        output = await asyncio.to_thread(generate_rollout, args, 0, source)
        own = flattened(output.samples)
        train_data(own)
        for order in ((0, 1), (1, 0)):
            group = [sample_type(index=at, prompt=0, session_id=f"{order}/{at}") for at in order]
            made = flattened([await play_group(args, group, plays)])
            train_data(made)
            assert sorted(one.index for one in made) == [one.index for one in own]


@pytest.mark.parametrize("mask", [False, True])
async def test_a_group_with_a_forked_episode_may_be_put_back(
    sample_type: Any, tmp_path: Path, mask: bool
) -> None:
    """With --partial-rollout, slime puts back the whole group and plays only the aborted episodes
    again: the completed ones keep their tokens, rewards and indices.
    """
    failing = {"f/1"}

    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(status=400) if request.routing_key in failing and request.call else None

    async with forking(tmp_path, faults=faults) as (_, args):
        vars(args).update(partial_rollout=True, toolroll_partial="restart", toolroll_reruns=0)
        source = DataSource(sample_type, [{"prompt": 0}], n=2)
        group = [
            sample_type(index=at, group_index=4, prompt=0, session_id=f"f/{at}") for at in (0, 1)
        ]
        group = await play_group(args, group, plays)
        assert [one.status.name for one in group] == ["COMPLETED", "ABORTED"]
        completed = [(one.tokens, one.response_length) for one in group[0]]
        put_back(source, [group], 7)
        failing.clear()
        [group] = source.get_samples(1)
        group = await play_group(args, group, plays, mask=mask)
        made = flattened([group])
    train_data(made)
    assert [(one.tokens, one.response_length) for one in made[:-1]] == completed
    assert [one.index for one in made] == [0] * len(completed) + [1]
    assert {one.group_index for one in made} == {4} and {one.reward for one in made} == {1.0}
    assert len({one.rollout_id for one in made[:-1]}) == 1
    assert [any(one.loss_mask) for one in made] == [not mask] * len(completed) + [True]
    assert not made[-1].remove_sample


async def plays(args: Any, sample: Any) -> Any:
    return await generate(args, sample, dict(SAMPLING))


async def test_deterministic_inference_gets_slime_s_seeds(
    sample_type: Any, closing: None, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"index": 0}\n{"index": 1}\n', encoding="utf-8")
    seeds: list[dict[str, set[Any]]] = []
    async with serving() as (engine, args):
        args.rollout_batch_size = args.over_sampling_batch_size = 1
        for on in (True, False):
            args.sglang_enable_deterministic_inference = on
            before = len(engine.log)
            source = DataSource(sample_type, [{"prompt": 0}], n=3)
            await asyncio.to_thread(generate_rollout, args, 0, source)
            seeds.append(seeds_of(engine.log[before:]))
        args.sglang_enable_deterministic_inference = True
        before = len(engine.log)
        args.eval_datasets = [eval_dataset("d", str(path), n_samples_per_eval_prompt=2)]
        await asyncio.to_thread(generate_rollout, args, 0, None, evaluation=True)
        evaluated = seeds_of(engine.log[before:])
    assert seeds[0] == {"0/0": {42}, "0/1": {43}, "0/2": {44}}
    assert seeds[1] == {"0/0": {None}, "0/1": {None}, "0/2": {None}}
    assert sorted(map(sorted, evaluated.values())) == [[42], [42], [43], [43]]


def seeds_of(log: list[Any]) -> dict[str, set[Any]]:
    found: dict[str, set[Any]] = {}
    for entry in log:
        if entry.output_ids:
            seed = entry.sampling_params.get("sampling_seed")
            found.setdefault(entry.routing_key, set()).add(seed)
    return found


async def test_the_sample_hooks_are_called_in_training_and_evaluation(
    sample_type: Any, closing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []

    async def apply(args: Any, value: Any, *, evaluation: bool) -> Any:
        called.append(evaluation)
        value.label = "hooked"
        return value

    install_hooks(monkeypatch, apply)
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"index": 0}\n', encoding="utf-8")
    async with serving() as (_, args):
        args.rollout_batch_size = args.over_sampling_batch_size = 1
        args.rollout_sample_hook_path = ["mine.hook"]
        args.eval_datasets = [eval_dataset("d", str(path))]
        source = DataSource(sample_type, [{"prompt": 0}], n=1)
        trained = await asyncio.to_thread(generate_rollout, args, 0, source)
        evaluated = await asyncio.to_thread(generate_rollout, args, 0, None, evaluation=True)
    assert called == [False, True]
    assert trained.samples[0][0].label == evaluated.data["d"]["samples"][0].label == "hooked"


def test_groups_that_teach_nothing_are_dropped(sample_type: Any) -> None:
    args, completed, aborted = (
        Namespace(reward_key=None),
        sample_type.Status.COMPLETED,
        sample_type.Status.ABORTED,
    )
    of = lambda *rewards: [sample_type(reward=reward, status=completed) for reward in rewards]
    assert keep_group(args, of(0.0, 1.0))
    assert not keep_group(args, of(1.0, 1.0))
    assert keep_group(args, [of(0.0, 0.0), *of(1.0)])
    assert not keep_group(args, [*of(0.0, 1.0), sample_type(status=aborted)])
