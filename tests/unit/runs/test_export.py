"""Exports: what other programs read is what the run holds, and nothing that may not be trained
on.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from examples.exports.to_tau_bench import main, tau_bench_results
from support.commands import toolroll
from support.exports import write_run
from support.results import episode, exported, summary_of, trajectory
from support.tau import REAL

from toolroll.agents.environments.tau_bench.package import import_module, installed
from toolroll.cli.export import export
from toolroll.evaluation.export.dataset import sample_rows
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.pass_at_k import pass_hat_k
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.types import Episode, StopReason


def test_what_may_be_trained_on_is_a_row_for_each_sequence() -> None:
    rows = list(sample_rows(exported()))
    names = ("task_id", "sample", "sequence", "reward", "fork_reason")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("t-0", 0, 0, 1.0, None),
        ("t-0", 0, 1, 1.0, "rewritten"),
        ("t-0", 1, 0, 0.0, None),
    ]
    part = trajectory()
    assert rows[0]["input_ids"] == part.input_ids.tolist()
    assert rows[0]["loss_mask"] == part.loss_mask.tolist()
    logprobs = [None if value != value else value for value in part.logprobs.tolist()]
    assert rows[0]["logprobs"] == logprobs


def trials() -> list[Episode]:
    """Four trials of six tasks with 0 to 4 passes, and two tasks that lack one or all."""
    found = [
        episode(f"t-{task}", sample, float(sample < passes))
        for task, passes in enumerate([0, 1, 2, 3, 4, 4])
        for sample in range(4)
    ]
    return [
        *found,
        *(episode("t-6", sample, 1.0) for sample in range(3)),
        episode("t-6", 3, reason=StopReason.USER_ERROR),
        *(episode("t-7", sample, reason=StopReason.USER_ERROR) for sample in range(4)),
    ]


def test_tau_benchs_format_has_whole_tasks_only() -> None:
    results, left_out = tau_bench_results(trials())
    assert left_out == ["t-6", "t-7"], "also a task without any graded trial"
    assert len(results) == 24
    user = {"role": "user", "content": "Hello."}
    messages = [user, {"role": "assistant", "content": "Goodbye."}]
    outcome = {"task_id": 0, "trial": 0, "reward": 0.0, "info": {}}
    assert results[0] == {**outcome, "traj": messages}
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
    theirs = {
        int(k): float(value) for k, value in re.findall(r"k=(\d+): ([\d.]+)", printed.getvalue())
    }
    rewards = {
        task: found for task, found in summary_of(*trials()).rewards.items() if task != "t-6"
    }
    assert theirs == {k: pytest.approx(pass_hat_k(list(rewards.values()), k)) for k in (1, 2, 3, 4)}


def test_a_script_writes_tau_benchs_format(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = episode("t-1", 0, reason=StopReason.USER_ERROR)
    for env, more in (("pond", [gone]), ("lake", [])):
        with RunDirectory(here / "run", env, {}) as folder:
            for played in (*(episode("t-0", sample, env=env) for sample in range(2)), *more):
                folder.append(played)
    main(["run", "tau.json", "--env", "pond"])
    said = capsys.readouterr().out
    assert "tau.json: 2 results\nleft out, because a trial is missing: t-1\n" in said
    assert [result["trial"] for result in json.loads(Path("tau.json").read_text())] == [0, 1]
    with pytest.raises(UsageError, match="already exists: name a new file"):
        main(["run", "tau.json", "--env", "pond"])
    with pytest.raises(UsageError, match="one environment: choose one with --env: lake, pond"):
        main(["run", "x"])


def test_the_command_writes_one_environment_without_provenance(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    for env in ("pond", "la/ke"):
        write_run(run, [episode("t-0", 0, env=env)], env)
    (run / "run.json").unlink()
    done = toolroll("export", run, "--format", "atif", "--env", "la/ke", "--out", out)
    assert "1 of 1 episodes; aborted ones" in done.stdout
    with pytest.raises(UsageError, match="already exists: name a new folder"):
        export(run, "atif", out, "la/ke")


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [episode("t-0", 0)])
    with pytest.raises(UsageError, match=r"the formats are parquet, atif$"):
        export(run, "csv", tmp_path / "x", None)
    with pytest.raises(UsageError, match=r"holds no episodes\.jsonl"):
        export(tmp_path, "parquet", tmp_path / "x", None)
