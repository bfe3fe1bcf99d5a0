"""Harbor, Inspect and lm-eval read what toolroll and `examples/exports` write. TOOLROLL_READERS is
the Python that has them (`make test-peers`), because Harbor needs Python 3.12.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from examples.exports.to_inspect import write_inspect_logs
from examples.exports.to_lm_eval import write_lm_eval
from support.exports import own_turns, varied, write_run
from support.results import summary_of

from toolroll.evaluation.export.atif import write_atif
from toolroll.evaluation.export.exported_run import ExportedRun
from toolroll.evaluation.report import report

READERS = os.environ.get("TOOLROLL_READERS", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not READERS, reason="TOOLROLL_READERS names no Python"),
]

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


def opened(program: str, folder: Path) -> Any:
    """What `program` prints about the files in `folder`, in the Python of the readers."""
    done = subprocess.run(
        [READERS, "-c", program, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def export(tmp_path: Path) -> Callable[[Callable[[ExportedRun, Path], object]], Path]:
    def write(writer: Callable[[ExportedRun, Path], object]) -> Path:
        writer(ExportedRun(write_run(tmp_path / "run", varied())), tmp_path / "out")
        return tmp_path / "out"

    return write


def test_harbor_reads_the_trajectories(export: Any, tmp_path: Path) -> None:
    read = opened(HARBOR, export(write_atif))
    assert (read["errors"], set(read["versions"])) == ([], {"ATIF-v1.7"})
    lines = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").open()]
    graded = [line for line in lines if line["status"] != "aborted"]
    graded.sort(key=lambda line: (line["task_id"], line["sample"]))
    assert read["turns"] == [[list(turn) for turn in own_turns(line)] for line in graded]


def test_inspect_reads_the_logs(export: Any) -> None:
    assert opened(INSPECT, export(write_inspect_logs)) == {
        "status": "success",
        "task": "pond",
        "model": "tiny",
        "mean": report(summary_of(*varied()))["reward"]["value"],
        "scores": [1.0, 0.5, None, 0.0, 1.0],  # by epoch and task
        "summaries": [False, False, False, False, True],
        "tokens": 76,
        "calls": [["look", {"at": 1}, False], ["look", {}, True]],
        "answer": "A pond.",
        "header": "pond",
    }


def test_lm_eval_prints_its_table(export: Any) -> None:
    read = opened(LM_EVAL, export(write_lm_eval))
    assert read["task"] == "pond"
    rows = [[cell.strip() for cell in row.split("|")] for row in read["table"].splitlines()]
    [reward] = [row for row in rows if "reward" in row]
    assert "0.625" in reward[-4] and reward[-3] == "±" and float(reward[-2]) == 0.125
