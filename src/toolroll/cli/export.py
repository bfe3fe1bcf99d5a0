"""`toolroll export`: writes a run in another format."""

from __future__ import annotations

from pathlib import Path

import orjson

from toolroll.cli.display import shortened
from toolroll.evaluation.export.atif import write_atif
from toolroll.evaluation.export.dataset import write_dataset
from toolroll.evaluation.export.exported_run import ExportedRun
from toolroll.evaluation.export.inspect_log import write_inspect_logs
from toolroll.evaluation.export.lm_eval import write_lm_eval
from toolroll.evaluation.export.tau_bench import tau_bench_results
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.report import read_summary
from toolroll.rollout.runtime.disk import written_whole
from toolroll.rollout.runtime.jsonable import json_bytes


def export(folder: Path, kind: str, out: Path, env: str | None) -> list[str]:
    """Write the run in `folder` to `out`. Return the messages to print.

    `kind`: one of `FORMATS`. `env`: export only this environment.
    """
    if kind not in FORMATS:
        raise UsageError(f"--format {kind!r}: the formats are {', '.join(FORMATS)}")
    run = ExportedRun(folder, env)
    return FORMATS[kind](run, out) + shortened(run.bad_lines)


def _parquet(run: ExportedRun, out: Path) -> list[str]:
    provenance = {env: run.provenance(env) for env in run.tasks}
    count = write_dataset(run.episodes(), out, provenance=provenance)
    line = f'{out}: {count} training samples; datasets.load_dataset("{out}") reads them'
    return [line, *_lost(run)]


def _atif(run: ExportedRun, out: Path) -> list[str]:
    total = sum(tasks.total() for tasks in run.tasks.values())
    return [f"{out}: {write_atif(run, out)} of {total} episodes; aborted ones are left out"]


def _inspect(run: ExportedRun, out: Path) -> list[str]:
    write_inspect_logs(run, out)
    return [f"{out}: inspect view --log-dir {out} shows it"]


def _lm_eval(run: ExportedRun, out: Path) -> list[str]:
    why = "no pass^k, because its tasks have different numbers of graded samples"
    unequal = [f"{env}: {why}" for env in write_lm_eval(run, out)]
    return [f"{out}: results_*.json and samples_*.jsonl", *unequal, *_lost(run)]


def _tau_bench(run: ExportedRun, out: Path) -> list[str]:
    if len(run.tasks) > 1:
        raise UsageError(
            f"tau-bench's format holds one environment: choose one with --env: "
            f"{', '.join(run.tasks)}"
        )
    results, left_out = tau_bench_results(run.episodes())
    if out.exists():
        raise UsageError(f"{out} already exists: name a new file")
    text = json_bytes(results, option=orjson.OPT_INDENT_2)
    with written_whole(out) as file:
        file.write(text)
    written = len({result["task_id"] for result in results})
    of_tasks = f" of {written + len(left_out)}" if left_out else ""
    messages = [f"{out}: {len(results)} results of {written}{of_tasks} tasks"]
    if left_out:
        messages.append(f"left out, because a trial is missing: {', '.join(left_out)}")
    return messages + _lost(run)


FORMATS = {
    "parquet": _parquet,
    "tau-bench": _tau_bench,
    "atif": _atif,
    "inspect": _inspect,
    "lm-eval": _lm_eval,
}


def _lost(run: ExportedRun) -> list[str]:
    """Return a message for each environment whose summary says that episodes have no reward."""
    return [
        f"{name}: {lost['episodes']} of {lost['of_episodes']} episodes have no reward and are left "
        f"out; {lost['tasks']} of {part['of_tasks']} tasks have no graded episode"
        for name, part in read_summary(run.folder).items()
        if name in run.tasks and (lost := part["lost"])["episodes"]
    ]
