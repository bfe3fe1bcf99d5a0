"""Other programs open what toolroll writes: datasets, pyarrow, pandas and polars the Parquet
samples, pandas and polars `episodes.jsonl`; Harbor, Inspect and lm-eval what the command `export`
and `examples/exports` write.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pandas
import pyarrow.dataset
import pytest
from examples.exports.to_inspect import write_inspect_logs
from examples.exports.to_lm_eval import write_lm_eval
from support import exports
from support.commands import toolroll
from support.results import episode, exported, summary_of, trajectory

from toolroll.evaluation.export.atif import write_atif
from toolroll.evaluation.export.dataset import sample_rows, write_dataset
from toolroll.evaluation.export.exported_run import ExportedRun
from toolroll.evaluation.report import report
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.run_directory import RunDirectory

# --- the samples ----------------------------------------------------------------------------------


def test_the_rows_and_the_card_say_what_the_data_set_is(tmp_path: Path) -> None:
    first, fork, _ = sample_rows(exported())
    assert first["weight_versions"] == [
        {"version": "v0", "start": 4, "stop": 7},
        {"version": "v1", "start": 9, "stop": 12},
    ]
    assert json.loads(first["messages"])[1] == {"role": "assistant", "content": "Goodbye."}
    assert (first["prompt_length"], fork["prompt_length"]) == (4, 6)
    provenance = {"pond": {"tokenizer_sha256": "8288"}}
    write_dataset(exported(), tmp_path / "set", provenance=provenance)
    card: Any = huggingface_hub.DatasetCard.load(tmp_path / "set" / "README.md")
    assert card.data.task_categories == ["text-generation"]
    assert "| pond | tiny | 3 | 8288 |" in card.text
    [config] = datasets.get_dataset_config_names(str(tmp_path / "set"))
    assert config == "default"
    assert sorted(file.name for file in (tmp_path / "set").iterdir()) == ["README.md", "data"]


@pytest.mark.parametrize("program", ["datasets", "pyarrow", "pandas", "polars"])
def test_the_folder_is_opened_by(program: str, tmp_path: Path) -> None:
    assert write_dataset(exported(), tmp_path / "set", rows_of_a_file=2) == 3
    data = tmp_path / "set" / "data"
    names = sorted(file.name for file in data.iterdir())
    assert names == ["train-00000.parquet", "train-00001.parquet"]
    rows: Any
    if program == "datasets":
        cache = str(tmp_path / "cache")
        rows = datasets.load_dataset(str(data.parent), split="train", cache_dir=cache)
        mask = rows.with_format("numpy")[0]["loss_mask"]
        assert mask.dtype.itemsize >= 4, "sums and `-mask` would wrap"
    elif program == "pyarrow":
        rows = pyarrow.dataset.dataset(data).to_table().to_pylist()
    elif program == "pandas":
        frame = pandas.read_parquet(data, dtype_backend="pyarrow")
        rows = pyarrow.Table.from_pandas(frame).to_pylist()
    else:
        polars = pytest.importorskip("polars")
        rows = polars.read_parquet(data).to_dicts()
        assert polars.scan_parquet(data).collect().to_dicts() == rows
    assert list(rows) == list(sample_rows(exported()))


def write_run(folder: Path, samples: int) -> None:
    with RunDirectory(folder, "pond", {}) as run:
        for sample in range(samples):
            run.append(episode("t-0", sample))


@pytest.mark.parametrize("program", ["pandas", "polars"])
def test_the_episode_file_is_opened_by(program: str, tmp_path: Path) -> None:
    write_run(tmp_path, samples=2)
    file = tmp_path / "episodes.jsonl"
    if program == "pandas":
        frame: Any = pandas.read_json(file, lines=True)
    else:
        polars = pytest.importorskip("polars")
        frame = polars.read_ndjson(file, infer_schema_length=None)
    assert list(frame["sample"]) == [0, 1]
    assert list(frame["trajectories"][0][0]["input_ids"]) == trajectory().input_ids.tolist()


def test_a_run_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to train on"):
        write_dataset(exported()[2:], tmp_path / "set")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "set").mkdir()
    with pytest.raises(UsageError, match="already exists"):
        write_dataset(exported(), tmp_path / "set")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot create .*file/set: Not a directory"):
        write_dataset(exported(), tmp_path / "file" / "set")


def test_the_command(tmp_path: Path) -> None:
    write_run(tmp_path / "run", samples=4)
    done = toolroll("export", tmp_path / "run", "--out", tmp_path / "set")
    assert "4 training samples; datasets.load_dataset(" in done.stdout


# --- the readers of exports -----------------------------------------------------------------------

READERS = os.environ.get("TOOLROLL_READERS", "")
"""The Python that has Harbor, Inspect and lm-eval (`make test-peers`): Harbor needs Python 3.12."""
HARBOR = """
import json, sys
from pathlib import Path
from harbor.models.trajectories import Trajectory
from harbor.utils.trajectory_validator import TrajectoryValidator
files = sorted(Path(sys.argv[1]).glob("*/*/agent/trajectory.json"))
errors = []
for path in files:
    validator = TrajectoryValidator()
    validator.validate(path)
    errors += validator.errors
read = [Trajectory.model_validate_json(path.read_text()) for path in files]
print(json.dumps({"errors": errors, "versions": [one.schema_version for one in read], "turns": [
    [[step.metrics.prompt_token_ids, step.metrics.completion_token_ids, step.metrics.logprobs]
     for step in one.steps if step.metrics] for one in read]}))
"""
INSPECT = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries
from inspect_ai.log import read_eval_log_sample
[info] = list_eval_logs(sys.argv[1])
log = read_eval_log(info)
sample = read_eval_log_sample(info, id="a/b", epoch=1)
calls = sample.messages[2].tool_calls
print(json.dumps({
    "status": log.status, "task": log.eval.task, "model": log.eval.model,
    "mean": log.results.scores[0].metrics["mean"].value,
    "scores": [s.scores and s.scores["reward"].value for s in log.samples],
    "summaries": [bool(s.error) for s in read_eval_log_sample_summaries(info)],
    "tokens": log.stats.model_usage["tiny"].total_tokens,
    "calls": [[call.function, call.arguments, bool(call.parse_error)] for call in calls],
    "answer": sample.output.completion, "header": read_eval_log(info, header_only=True).eval.task,
}))
"""
LM_EVAL = """
import json, sys
from pathlib import Path
from lm_eval.utils import (
    get_file_task_name, get_results_filenames, get_sample_results_filenames, make_table)
files = [str(path) for path in Path(sys.argv[1]).glob("*/*")]
[results], [samples] = get_results_filenames(files), get_sample_results_filenames(files)
print(json.dumps({
    "table": make_table(json.loads(Path(results).read_text())),
    "task": get_file_task_name(Path(samples).name),
}))
"""


def with_readers(test: Any) -> Any:
    skip = pytest.mark.skipif(not READERS, reason="TOOLROLL_READERS names no Python")
    return pytest.mark.peers(skip(test))


def opened(program: str, folder: Path, write: Callable[[ExportedRun, Path], object]) -> Any:
    """What `program` prints about what `write` makes of a run, in the Python of the readers."""
    write(ExportedRun(exports.write_run(folder / "run", exports.varied())), folder / "out")
    done = subprocess.run(
        [READERS, "-c", program, str(folder / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@with_readers
def test_harbor_reads_the_trajectories(tmp_path: Path) -> None:
    read = opened(HARBOR, tmp_path, write_atif)
    assert (read["errors"], set(read["versions"])) == ([], {"ATIF-v1.7"})
    lines = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").open()]
    graded = [line for line in lines if line["status"] != "aborted"]
    graded.sort(key=lambda line: (line["task_id"], line["sample"]))
    assert read["turns"] == [[list(turn) for turn in exports.own_turns(line)] for line in graded]


@with_readers
def test_inspect_reads_the_logs(tmp_path: Path) -> None:
    assert opened(INSPECT, tmp_path, write_inspect_logs) == {
        "status": "success",
        "task": "pond",
        "model": "tiny",
        "mean": report(summary_of(*exports.varied()))["reward"]["value"],
        "scores": [1.0, 0.5, None, 0.0, 1.0],  # by epoch and task
        "summaries": [False, False, False, False, True],
        "tokens": 76,
        "calls": [["look", {"at": 1}, False], ["look", {}, True]],
        "answer": "A pond.",
        "header": "pond",
    }


@with_readers
def test_lm_eval_prints_its_table(tmp_path: Path) -> None:
    read = opened(LM_EVAL, tmp_path, write_lm_eval)
    assert read["task"] == "pond"
    rows = [[cell.strip() for cell in row.split("|")] for row in read["table"].splitlines()]
    [reward] = [row for row in rows if "reward" in row]
    assert "0.625" in reward[-4] and reward[-3] == "±" and float(reward[-2]) == 0.125
