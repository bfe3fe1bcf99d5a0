"""The slime adapter's `generate_rollout`: a trainer's loop and its evaluations."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from support.slime_mirror import DataSource, EvalDataset, train_data
from support.slime_trainer import every_sampled_token_is_as_served, reference_lines, says, serving

from toolroll.rollout.adapters.slime import generate_rollout, keep_group
from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.testing import (
    Fault,
    PolicyRequest,
    Reply,
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
        args.dynamic_sampling_filter_path = "toolroll.rollout.adapters.slime.keep_group"
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


async def test_a_rollout_of_failures_ends_with_their_words(sample_type: Any, closing: None) -> None:
    async with serving(faults=lambda request: Fault(status=400, body=b"out of order")) as (_, args):
        args.toolroll_max_dropped = 3
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
            EvalDataset("desk-three", str(tmp_path / "tasks.jsonl"), n_samples_per_eval_prompt=2)
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
        args.toolroll_concurrency, args.toolroll_retries = 1, 0
        args.eval_datasets = [EvalDataset("d", str(path))]
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
            args.eval_datasets = [dataclasses.replace(EvalDataset("d", str(path)), **wrong)]  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=words):
                await asyncio.to_thread(generate_rollout, args, 0, None, evaluation=True)


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
