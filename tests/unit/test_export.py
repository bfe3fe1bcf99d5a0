"""Exports: what other programs read is what the run holds, and nothing that may not be trained on."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.results import episode, trajectory
from support.tau import REAL
from typer.testing import CliRunner

from toolroll.agents.tau_bench.package import import_module, installed
from toolroll.rollout.cli.app import app
from toolroll.rollout.cli.export import export
from toolroll.rollout.errors import UsageError
from toolroll.rollout.export import tau_bench_results, write_dataset
from toolroll.rollout.metrics import summarize
from toolroll.rollout.rates import pass_hat_k
from toolroll.rollout.run_folder import RunFolder
from toolroll.rollout.types import Episode, StopReason


def episodes() -> list[Episode]:
    untrained = trajectory()
    untrained.loss_mask[:] = 0
    return [
        episode("t-0", 0, 1.0, trajectories=[trajectory(), trajectory(14, [(6, 9)], fork_reason="rewritten")]),
        episode("t-0", 1, 0.0),
        episode("t-1", 0, 0.5, trajectories=[untrained]),
        episode("t-1", 1, 0.5, trajectories=[trajectory(source="transcript")]),
        episode("t-2", 0, reason=StopReason.ENGINE_ERROR),
        episode("t-2", 1, 1.0, trajectories=[], info={"trainable": False}),
    ]


def load(folder: Path, cache: Path) -> Any:
    return datasets.load_dataset(str(folder), split="train", cache_dir=str(cache))


def test_datasets_reads_the_training_samples(tmp_path: Path) -> None:
    assert write_dataset(episodes(), tmp_path / "set", rows_of_a_file=2) == 3
    names = sorted(file.name for file in (tmp_path / "set" / "data").iterdir())
    assert names == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    rows = load(tmp_path / "set", tmp_path / "cache")
    assert [(row["task_id"], row["sample"], row["sequence"], row["reward"]) for row in rows] == [
        ("t-0", 0, 0, 1.0),
        ("t-0", 0, 1, 1.0),
        ("t-0", 1, 0, 0.0),
    ]
    first, fork = rows[0], rows[1]
    part = trajectory()
    assert first["input_ids"] == part.input_ids.tolist()
    assert first["loss_mask"] == part.loss_mask.tolist()
    assert first["logprobs"] == [None if value != value else value for value in part.logprobs.tolist()]
    assert first["weight_versions"] == [{"version": "v0", "start": 4, "stop": 7}, {"version": "v1", "start": 9, "stop": 12}]
    assert json.loads(first["messages"])[1] == {"role": "assistant", "content": "Goodbye."}
    assert (first["prompt_length"], first["fork_reason"], fork["fork_reason"], fork["prompt_length"]) == (4, None, "rewritten", 6)


def test_a_run_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to be trained on"):
        write_dataset(episodes()[2:], tmp_path / "set")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "set").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        write_dataset(episodes(), tmp_path / "set")


def trials() -> list[Episode]:
    """Four trials of six tasks with 0 to 4 passes, and a seventh task that lacks one."""
    found = [
        episode(f"t-{task}", sample, float(sample < passes)) for task, passes in enumerate([0, 1, 2, 3, 4, 4]) for sample in range(4)
    ]
    return [*found, *(episode("t-6", sample, 1.0) for sample in range(3)), episode("t-6", 3, reason=StopReason.USER_ERROR)]


def test_tau_benchs_format_has_whole_tasks_only() -> None:
    results, left_out = tau_bench_results(trials())
    assert left_out == ["t-6"]
    assert len(results) == 24
    assert results[0] == {
        "task_id": 0,
        "reward": 0.0,
        "info": {},
        "traj": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Goodbye."}],
        "trial": 0,
    }
    assert [found["trial"] for found in results] == sorted(found["trial"] for found in results)


@pytest.mark.peers
def test_tau_bench_itself_gives_the_same_pass_hat_k() -> None:
    if not installed(REAL.package, "retail"):
        pytest.skip("tau-bench is on GitHub only")
    types, run = import_module("tau_bench.types"), import_module("tau_bench.run")
    results, _ = tau_bench_results(trials())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run.display_metrics([types.EnvRunResult(**found) for found in results])
    theirs = {int(k): float(value) for k, value in re.findall(r"k=(\d+): ([\d.]+)", printed.getvalue())}
    rewards = {task: found for task, found in summarize(trials())["pond"].rewards.items() if task != "t-6"}
    assert theirs == {k: pytest.approx(pass_hat_k(list(rewards.values()), k)) for k in (1, 2, 3, 4)}


def test_the_command(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for env in ("pond", "lake"):
        with RunFolder(run, env, {}) as folder:
            for sample in range(2):
                folder.append(episode("t-0", sample, env=env))
    done = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "set")], env={"COLUMNS": "300"})
    assert "4 training samples; datasets.load_dataset(" in done.stdout
    arguments = ["export", str(run), "--format", "tau-bench", "--env", "pond", "--out", str(tmp_path / "tau.json")]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert "tau.json: 2 results of 1 tasks" in done.stdout
    assert [found["trial"] for found in json.loads((tmp_path / "tau.json").read_text())] == [0, 1]
    for words, kind, env, out in (
        ("there are parquet, tau-bench", "csv", None, "x"),
        ("one environment: --env, of lake, pond", "tau-bench", None, "x"),
        ("is there already", "tau-bench", "pond", "tau.json"),
    ):
        with pytest.raises(UsageError, match=words):
            export(run, kind, tmp_path / out, env)
    with pytest.raises(UsageError, match=r"holds no episodes\.jsonl"):
        export(tmp_path, "parquet", tmp_path / "x", None)
