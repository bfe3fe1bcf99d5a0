"""The slime adapter's `generate_rollout`: a trainer's loop, its evaluations and its rewards."""

import asyncio
import dataclasses
import json
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from support.slime_mirror import (
    eval_dataset,
    flattened,
    install_hooks,
    play_group,
    put_back,
    train_data,
)
from support.slime_trainer import (
    every_sampled_token_is_as_served,
    forking,
    play,
    reference_line,
    says,
    serving,
)

from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.testing import Fault, PolicyRequest
from toolroll.trainers.slime import keep_group, normalize_rewards, training

REFUSED = Fault(status=400, body=b"out of order")


def tasks_file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def group_indices(groups: list[list[Any]]) -> list[int]:
    return [group[0].group_index for group in groups]


def one_group(args: Namespace, **given: Any) -> None:
    vars(args).update({"rollout_batch_size": 1, "over_sampling_batch_size": 1, **given})


# --- a trainer's loop -----------------------------------------------------------------------------


async def test_a_trainer_s_loop_gets_consistent_samples(rollout: Any) -> None:
    """Two iterations, groups of 8, the weights updated in the middle of the first rollout."""

    def policy(request: PolicyRequest) -> str:
        group, position = map(int, request.routing_key.split("/"))
        if position % 2:  # half of each group give up at once
            return "I cannot help you. Goodbye."
        return reference_line(group % 2, request.call)

    def faults(request: PolicyRequest) -> Fault | None:
        updated = request.routing_key == "0/0" and request.call == 1
        return Fault(weight_version="2", switch_after=4) if updated else None

    async with serving(policy, faults=faults, weight_version="1") as (engine, args):
        args.dynamic_sampling_filter_path = "toolroll.trainers.slime.keep_group"
        source = rollout.source(0, 1, n=8)
        outputs = [await rollout(args, source)]
        engine.weight_version = "3"
        outputs.append(await rollout(args, source, 1))
    for output in outputs:
        assert type(output).__name__ == "RolloutFnTrainOutput"
        for group in output.samples:
            assert len(group) == 8 and len({sample.group_index for sample in group}) == 1
            assert {sample.reward for sample in group} == {0.0, 1.0}
        samples = flattened(output.samples)
        assert [sample.index for sample in samples] == sorted(sample.index for sample in samples)
        assert len(output.samples) == 2
        train_data(samples)
    [updated] = [sample for sample in flattened(outputs[0].samples) if sample.session_id == "0/0"]
    assert updated.weight_versions[:3] == ["1", "1", "2"], "a turn with an update has both versions"
    first, second = (output.metrics for output in outputs)
    assert first["toolroll/weight_version_staleness_max"] == 1.0
    assert second["toolroll/weight_version_staleness_max"] == 0.0
    assert first["toolroll/mixed_version_share"] > 0 and first["toolroll/cached_share"] > 0.5
    assert first["toolroll/episodes"] == 16.0
    counts = "turns invalid_calls tool_errors cached_share token_mismatches aborted"
    assert {f"toolroll/{name}" for name in counts.split()} <= first.keys()
    every_sampled_token_is_as_served(outputs, engine)


async def test_a_group_with_an_aborted_episode_is_replaced(rollout: Any) -> None:
    async with serving(faults=lambda r: REFUSED if r.routing_key == "1/1" else None) as (_, args):
        args.over_sampling_batch_size = 1
        output = await rollout(args, rollout.source(n=2))
    assert group_indices(output.samples) == [0, 2]
    assert output.metrics["rollout/dynamic_filter/drop_aborted"] == 1.0
    assert output.metrics["toolroll/aborted"] == 1.0


async def test_failures_end_with_their_words(rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_MOST_ABORTED", 3)
    async with serving(faults=lambda request: REFUSED) as (_, args):
        with pytest.raises(RolloutError, match=r"3 groups in a row.*EngineError"):
            await rollout(args, rollout.source(n=2))
        with pytest.raises(UsageError, match="--input-key index"):
            await rollout(args, rollout.source("x", n=2))


async def test_groups_beyond_the_batch_end_at_the_engine(rollout: Any) -> None:
    gate = asyncio.Event()

    async def policy(request: PolicyRequest) -> str:
        if request.routing_key.startswith("2/"):
            await gate.wait()  # never within the rollout
        return says()(request)

    async with serving(policy) as (engine, args):
        vars(args).update(
            over_sampling_batch_size=3, partial_rollout=True, toolroll_partial="restart"
        )
        source = rollout.source(n=2)
        assert group_indices((await rollout(args, source)).samples) == [0, 1]
        assert [(s.group_index, s.tokens) for s in flattened(source.buffer)] == [(2, [])] * 2
        await engine.until(
            lambda core: all(e.aborted for e in core.log if e.routing_key.startswith("2/"))
        )
        gate.set()
        args.over_sampling_batch_size = 2
        assert group_indices((await rollout(args, source, 1)).samples) == [2, 3]


# --- evaluations ----------------------------------------------------------------------------------


async def test_evaluations_play_rows_twice(rollout: Any, tmp_path: Path) -> None:
    rows = [{"index": index, "metadata": {"env": "desk", "split": "test"}} for index in range(3)]
    sessions: list[str] = []

    def policy(request: PolicyRequest) -> str:
        if request.routing_key not in sessions:
            sessions.append(request.routing_key)
        return reference_line(sessions.index(request.routing_key) // 2, request.call)

    async with serving(policy) as (_, args):
        # one after another: sessions come in the order of the rows
        args.toolroll_concurrency, args.toolroll_env = 1, None
        path = tasks_file(tmp_path, *rows)
        args.eval_datasets = [eval_dataset("three", path, n_samples_per_eval_prompt=2)]
        output = await rollout(args, evaluation=True)
    assert type(output).__name__ == "RolloutFnEvalOutput"
    data = output.data["three"]
    assert data["rewards"] == [1.0] * 6 and data["truncated"] == [False] * 6
    assert [sample.index for sample in data["samples"]] == list(range(6))
    assert output.metrics["eval/three/toolroll/aborted"] == 0.0


async def test_an_evaluation_counts_graded_episodes_only(rollout: Any, tmp_path: Path) -> None:
    path = tasks_file(tmp_path, {"index": 0}, {"index": 1})
    failing: set[str] | None = None

    def faults(request: PolicyRequest) -> Fault | None:
        if failing is not None and not failing:
            failing.add(request.routing_key)
        return REFUSED if failing is None or request.routing_key in failing else None

    async with serving(faults=faults) as (_, args):
        args.toolroll_concurrency, args.toolroll_reruns = 1, 0
        args.eval_datasets = [eval_dataset("d", path)]
        with pytest.raises(RolloutError, match="none of 2 episodes could be graded"):
            await rollout(args, evaluation=True)
        failing = set()  # now only the first session fails
        output = await rollout(args, evaluation=True)
        assert len(output.data["d"]["rewards"]) == len(output.data["d"]["samples"]) == 1
        assert output.metrics["eval/d/toolroll/aborted"] == 1.0
        for wrong, words in (
            ({"path": "/nowhere"}, "does not exist"),
            ({"input_key": "text"}, "no key 'text'"),
        ):
            args.eval_datasets = [dataclasses.replace(eval_dataset("d", path), **wrong)]
            with pytest.raises(UsageError, match=words):
                await rollout(args, evaluation=True)


# --- forked episodes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "warnings"),
    [
        ({"advantage_estimator": "grpo"}, 1),
        ({"advantage_estimator": "ppo"}, 0),
        ({"advantage_estimator": "grpo", "rewards_normalization": False}, 0),
        ({"advantage_estimator": "grpo", "custom_reward_post_process_path": "mine.norm"}, 0),
    ],
    ids=str,
)
async def test_a_fork_that_slime_normalizes_wrongly_is_logged_once(
    rollout: Any, tmp_path: Path, caplog: Any, given: dict[str, Any], warnings: int
) -> None:
    training._warn_of_forks.cache_clear()
    async with forking(tmp_path) as (_, args):
        one_group(args, **given)
        source = rollout.source(n=2)
        for number in (0, 1):
            [group] = (await rollout(args, source, number)).samples
    assert [sample.index for sample in group] == [2] * (len(group) - 1) + [3] and len(group) > 2
    logged = [text for text in caplog.messages if "--custom-reward-post-process-path" in text]
    assert len(logged) == warnings


async def test_forked_and_others_mix(sample_type: Any, rollout: Any, tmp_path: Path) -> None:
    """slime flattens a batch by the type of its first item, so a mixed batch ended the training.
    Its own evaluation counts each sample of a list, so it gets the first one only.
    """
    async with forking(tmp_path) as (_, args):
        one_group(args)
        output = await rollout(args, rollout.source(n=2))
        own = flattened(output.samples)
        train_data(own)
        for order in ((0, 1), (1, 0)):
            group = [sample_type(index=i, prompt=0, session_id=f"{order}/{i}") for i in order]
            samples = flattened([await play_group(args, group, play)])
            train_data(samples)
            assert sorted(s.index for s in samples) == [s.index for s in own]
        sample = sample_type(index=0, prompt=0, session_id="evaluation/0")
        evaluated = await play(args, sample, evaluation=True)
    assert isinstance(evaluated, sample_type) and evaluated.reward == 1.0


@pytest.mark.parametrize("mask", [False, True])
async def test_a_forked_group_may_be_put_back(
    sample_type: Any, rollout: Any, tmp_path: Path, mask: bool
) -> None:
    """With --partial-rollout, slime puts back the whole group and plays only the aborted episodes
    again: the completed ones keep their tokens, rewards and indices.
    """
    failing = {"f/1"}

    def faults(request: PolicyRequest) -> Fault | None:
        return REFUSED if request.routing_key in failing and request.call else None

    async with forking(tmp_path, faults=faults) as (_, args):
        vars(args).update(partial_rollout=True, toolroll_partial="restart", toolroll_reruns=0)
        source = rollout.source(n=2)
        group = [sample_type(index=i, group_index=4, prompt=0, session_id=f"f/{i}") for i in (0, 1)]
        group = await play_group(args, group, play)
        assert [item.status.name for item in group] == ["COMPLETED", "ABORTED"]
        completed = [(s.tokens, s.response_length) for s in group[0]]
        put_back(source, [group], 7)
        failing.clear()
        [group] = source.get_samples(1)
        samples = flattened([await play_group(args, group, play, mask=mask)])
    train_data(samples)
    *forked, other = samples
    assert [(s.tokens, s.response_length) for s in forked] == completed
    assert [s.index for s in samples] == [0] * len(completed) + [1]
    assert {(s.group_index, s.reward) for s in samples} == {(4, 1.0)}
    assert len({s.rollout_id for s in forked}) == 1
    assert [any(s.loss_mask) for s in samples] == [not mask] * len(completed) + [True]
    assert not other.remove_sample


# --- seeds, hooks and filters ---------------------------------------------------------------------


async def test_deterministic_runs_get_seeds(rollout: Any, tmp_path: Path) -> None:
    async def seeds(source: Any, **options: Any) -> list[Any]:
        """The seeds of each session, in the order of the sessions' seeds."""
        engine.log.clear()
        await rollout(args, source, **options)
        by_session: dict[str, set[Any]] = {}
        for entry in engine.log:
            if entry.output_ids:
                seed = entry.sampling_params.get("sampling_seed")
                by_session.setdefault(entry.routing_key, set()).add(seed)
        return [by_session[key] for key in sorted(by_session)] if source else [*by_session.values()]

    async with serving() as (engine, args):
        one_group(args)
        path = tasks_file(tmp_path, {"index": 0}, {"index": 1})
        args.eval_datasets = [eval_dataset("d", path, n_samples_per_eval_prompt=2)]
        for deterministic, expected in ((True, [{42}, {43}, {44}]), (False, [{None}] * 3)):
            args.sglang_enable_deterministic_inference = deterministic
            assert await seeds(rollout.source(n=3)) == expected
        args.sglang_enable_deterministic_inference = True
        evaluated = await seeds(None, evaluation=True)
    assert sorted(map(sorted, evaluated)) == [[42], [42], [43], [43]]


async def test_sample_hooks_are_called_in_training_and_evaluation(
    rollout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []

    async def apply(args: Any, value: Any, *, evaluation: bool) -> Any:
        called.append(evaluation)
        value.label = "hooked"
        return value

    install_hooks(monkeypatch, apply)
    async with serving() as (_, args):
        one_group(args, rollout_sample_hook_path=["mine.hook"])
        args.eval_datasets = [eval_dataset("d", tasks_file(tmp_path, {"index": 0}))]
        trained = await rollout(args, rollout.source(n=1))
        evaluated = await rollout(args, evaluation=True)
    assert called == [False, True]
    assert trained.samples[0][0].label == evaluated.data["d"]["samples"][0].label == "hooked"


def test_useless_groups_are_dropped(sample_type: Any) -> None:
    """A reward of a list is a forked episode's. None: an aborted episode."""

    def sample(reward: Any) -> Any:
        if isinstance(reward, list):
            return [sample(each) for each in reward]
        status = sample_type.Status.ABORTED if reward is None else sample_type.Status.COMPLETED
        return sample_type(reward=reward, status=status)

    kept: list[list[Any]] = [[0.0, 1.0], [[0.0, 0.0], 1.0]]
    dropped: list[list[Any]] = [[1.0, 1.0], [0.0, 1.0, None]]
    for group in (*kept, *dropped):
        samples = list(map(sample, group))
        assert keep_group(Namespace(reward_key=None), samples) is (group in kept), group


# --- rewards that are normalized within groups, against slime's own formula -----------------------

GROUPS = [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
GRPO: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "reward_key": None,
}
"""slime's arguments, with its defaults."""


def slime_formula(groups: list[list[float]], *, divided: bool) -> list[float]:
    """What slime computes for groups of equal size (its ray/rollout.py)."""
    normalized = []
    for group in groups:
        mean = statistics.fmean(group)
        deviation = statistics.stdev(group) + 1e-6 if divided else 1.0
        normalized += [(reward - mean) / deviation for reward in group]
    return normalized


@pytest.mark.parametrize(
    ("given", "divided"),
    [
        ({}, True),
        ({"grpo_std_normalization": False}, False),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, False),
        ({"advantage_estimator": "ppo"}, None),
        ({"rewards_normalization": False}, None),
    ],
    ids=str,
)
def test_a_fork_counts_once(sample_type: Any, given: dict[str, Any], divided: bool | None) -> None:
    """slime takes one mean of the batch, in which a forked episode counts for each sample. Other
    estimators (`divided` is None) get the raw rewards.
    """
    rewards = [reward for group in GROUPS for reward in group]
    samples = [sample_type(group_index=i // 4, index=i, reward=r) for i, r in enumerate(rewards)]
    expected = rewards if divided is None else slime_formula(GROUPS, divided=divided)
    args = Namespace(**{**GRPO, **given})
    raw, normalized = normalize_rewards(args, samples)
    assert raw == rewards and normalized == pytest.approx(expected)
    samples[0].rollout_id = 0
    sibling = sample_type(group_index=0, index=0, rollout_id=0, reward=1.0)
    raw, normalized = normalize_rewards(args, [samples[0], sibling, *samples[1:]])
    assert raw == [1.0, *rewards] and normalized == pytest.approx([expected[0], *expected])


def test_what_the_samples_of_an_episode_share(sample_type: Any) -> None:
    """A rollout's id or an index. With neither, or in groups of one, each is an episode."""
    args = Namespace(**{**GRPO, "reward_key": "key", "grpo_std_normalization": False})
    for fields, expected in (
        ([{"rollout_id": n} for n in (0, 0, 1, 1, 1)], [0.5] * 2 + [-0.5] * 3),
        ([{"index": n} for n in (0, 0, 1, 1, 1)], [0.5] * 2 + [-0.5] * 3),
        ([{"group_index": 0}] * 5, [0.6] * 2 + [-0.4] * 3),
        ([{"group_index": n} for n in range(5)], [0.0] * 5),
    ):
        rewards = [{"key": reward} for reward in (1.0, 1.0, 0.0, 0.0, 0.0)]
        pairs = zip(rewards, fields, strict=True)
        samples = [sample_type(reward=r, **{"group_index": 0, **given}) for r, given in pairs]
        assert normalize_rewards(args, samples)[1] == pytest.approx(expected), fields


def test_equal_rewards_are_zero_and_a_missing_group_is_refused(sample_type: Any) -> None:
    samples = [sample_type(group_index=i // 2, index=i, reward=0.1) for i in range(3)]
    assert normalize_rewards(Namespace(**GRPO), samples)[1] == pytest.approx([0.0, 0.0, 0.0])
    for fields, words in (
        ({"reward": 1.0}, "sample 3 has no group_index"),
        ({"group_index": 0}, "sample 3 has no reward: drop such groups"),
    ):
        with pytest.raises(UsageError, match=words):
            normalize_rewards(Namespace(**GRPO), [sample_type(index=3, **fields)])
