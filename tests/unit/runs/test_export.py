"""Exports: what other programs read is what the run holds, without what is not trained."""

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any
from zipfile import ZipFile

import pytest
from examples.exports import to_inspect, to_lm_eval
from examples.exports.to_inspect import write_inspect_logs
from examples.exports.to_lm_eval import write_lm_eval
from examples.exports.to_tau_bench import main, tau_bench_results
from support.commands import toolroll
from support.exports import METRICS, varied, write_run
from support.results import episode, exported, summary_of
from support.tau import REAL

from toolroll import Episode, StopReason, UsageError
from toolroll.agents.environments.tau_bench.package import import_module, installed
from toolroll.cli.export import export
from toolroll.evaluation.export.dataset import sample_rows
from toolroll.evaluation.export.exported_run import ExportedRun
from toolroll.evaluation.report import report
from toolroll.rollout.runs.pass_at_k import pass_estimates, pass_hat_k
from toolroll.rollout.runs.run_directory import RunDirectory


def test_what_may_be_trained_on_is_a_row_for_each_sequence() -> None:
    rows = list(sample_rows(exported()))
    names = ("task_id", "sample", "sequence", "reward", "fork_reason")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("t-0", 0, 0, 1.0, None),
        ("t-0", 0, 1, 1.0, "rewritten"),
        ("t-0", 1, 0, 0.0, None),
    ]
    parts = [part for one in exported()[:2] for part in one.result.trajectories]
    for row, part in zip(rows, parts, strict=True):
        assert row["input_ids"] == part.input_ids.tolist()
        assert row["loss_mask"] == part.loss_mask.tolist()
        logprobs = [None if value != value else value for value in part.logprobs.tolist()]
        assert row["logprobs"] == logprobs


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
    for source, kind, words in (
        (run, "atif", "already exists: name a new folder"),
        (run, "csv", r"the formats are parquet, atif$"),
        (tmp_path, "parquet", r"holds no episodes\.jsonl"),
    ):
        with pytest.raises(UsageError, match=words):
            export(source, kind, out, "la/ke")


# --- the formats of Inspect and lm-eval -----------------------------------------------------------


MEANS = [0.5, 0.75]
"""The mean rewards of the two graded tasks of `varied`."""
GONE = "engine_error: EngineError: gone"
ERROR = stdev(MEANS) / 2**0.5


def test_an_inspect_log_has_the_scores_and_the_usage(tmp_path: Path) -> None:
    run = ExportedRun(write_run(tmp_path / "run", varied()))
    write_inspect_logs(run, tmp_path / "logs")
    with ZipFile(tmp_path / "logs" / "2031-03-10T09-30-00_pond.eval") as file:
        log: Any = {name: json.loads(file.read(name)) for name in file.namelist()}
    header = log["header.json"]
    assert header["eval"]["dataset"]["sample_ids"] == ["a/b", "t-1", "t-2"]
    assert header["eval"]["config"]["epochs"] == 2
    [score] = header["results"]["scores"]
    assert (score["scored_samples"], score["unscored_samples"]) == (4, 1)
    assert score["metrics"]["mean"]["value"] == 0.625
    assert score["metrics"]["mean"]["value"] == report(summary_of(*varied()))["reward"]["value"]
    assert score["metrics"]["stderr"]["value"] == pytest.approx(ERROR)
    sample = log["samples/a/b_epoch_1.json"]
    assert sample["scores"] == {"reward": {"value": 1.0}}
    tokens = {"input_tokens": 7, "input_tokens_cache_read": 6, "output_tokens": 6}
    assert sample["model_usage"]["tiny"] == {**tokens, "total_tokens": 19}
    assert [message["role"] for message in sample["input"]] == ["system", "user"]
    first, second = sample["messages"][2]["tool_calls"]
    assert (first["arguments"], first["parse_error"]) == ({"at": 1}, None)
    assert (second["arguments"], second["parse_error"]) == ({}, 'no JSON object: {"at": ')
    aborted = log["samples/t-2_epoch_1.json"]
    assert (aborted["scores"], aborted["error"]["message"]) == (None, GONE)
    assert [line["error"] for line in log["summaries.json"]] == [None] * 4 + [GONE]


def lm_eval(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    [results] = folder.glob("tiny/results_2031-03-10T09-30-00.000000.json")
    [samples] = folder.glob("tiny/samples_*_2031-03-10T09-30-00.000000.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text()), lines


def test_lm_evals_results_are_those_of_the_run(tmp_path: Path) -> None:
    run = ExportedRun(write_run(tmp_path / "run", varied()))
    assert write_lm_eval(run, tmp_path / "out") == []
    results, lines = lm_eval(tmp_path / "out")
    found = results["results"]["pond"]
    rates = pass_estimates(summary_of(*varied()).rewards)["pass^k"]
    assert found["reward,none"] == 0.625
    assert found["reward_stderr,none"] == pytest.approx(ERROR)
    for k, estimate in rates.items():
        assert found[f"pass^{k},none"] == estimate.value
    assert list(rates) == [1, 2]
    assert results["n-samples"]["pond"] == {"original": 3, "effective": 2}
    assert results["versions"]["pond"] == "pond-data 2"
    assert [line["reward"] for line in lines] == MEANS
    assert lines[0]["doc"]["task_id"] == "a/b"
    assert lines[0]["resps"] == [["A pond.", "A pond.Yes."]]


def test_unequal_tasks_have_no_rates_and_two_models_no_results(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [episode("t-0", 0), episode("t-0", 1), episode("t-1", 0)])
    assert write_lm_eval(ExportedRun(run), tmp_path / "out") == ["pond"]
    assert "pass^1,none" not in lm_eval(tmp_path / "out")[0]["results"]["pond"]
    write_run(run, [replace(episode("t-2", 0), model="other")])
    with pytest.raises(UsageError, match=r"those of one model; .* has other, tiny"):
        write_lm_eval(ExportedRun(run), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [(to_inspect, "inspect view --log-dir"), (to_lm_eval, "results and samples")],
)
def test_the_script_writes(script: Any, words: str, tmp_path: Path, capsys: Any) -> None:
    """Also a run whose `run.json` has no provenance, and only one of its environments."""
    for env in ("pond", "la/ke"):
        write_run(tmp_path / "run", [episode("t-0", 0, env=env, metrics=METRICS)], env)
    (tmp_path / "run" / "run.json").unlink()
    arguments = [str(tmp_path / "run"), str(tmp_path / "out"), "--env", "la/ke"]
    script.main(arguments)
    assert words in capsys.readouterr().out
    with pytest.raises(UsageError, match="already exists: name a new folder"):
        script.main(arguments)
