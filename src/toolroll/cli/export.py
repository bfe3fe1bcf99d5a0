"""`toolroll export`: writes a run in another format."""

from __future__ import annotations

from pathlib import Path

from toolroll.cli.display import shortened
from toolroll.endpoint.sessions.session_store import unfinished_sessions
from toolroll.evaluation.export.atif import write_atif
from toolroll.evaluation.export.dataset import write_dataset
from toolroll.evaluation.export.exported_run import ExportedRun
from toolroll.evaluation.report import read_summary
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.run_directory import unfinished


def export(folder: Path, kind: str, out: Path, env: str | None) -> list[str]:
    """Write the run in `folder` to `out`. Return the messages to print.

    `kind`: one of `FORMATS`. `env`: export only this environment.
    """
    if kind not in FORMATS:
        raise UsageError(f"--format {kind!r}: the formats are {', '.join(FORMATS)}")
    left_out = unfinished_sessions(folder)
    try:
        run = ExportedRun(folder, env)
        lines = FORMATS[kind](run, out) + shortened(run.bad_lines)
        counts = {name: tasks.total() for name, tasks in run.tasks.items()}
        left = unfinished(folder, counts)
        lines += [f"{name}: {line}" for name, line in left.items() if env in (None, name)]
    except UsageError as error:
        raise UsageError("\n".join((str(error), *left_out))) from error
    return lines + left_out


def _parquet(run: ExportedRun, out: Path) -> list[str]:
    provenance = {env: run.provenance(env) for env in run.tasks}
    count = write_dataset(run.episodes(), out, provenance=provenance)
    line = f'{out}: {count} training samples; datasets.load_dataset("{out}") reads them'
    return [line, *_lost(run)]


def _atif(run: ExportedRun, out: Path) -> list[str]:
    total = sum(tasks.total() for tasks in run.tasks.values())
    return [f"{out}: {write_atif(run, out)} of {total} episodes; aborted ones are left out"]


FORMATS = {"parquet": _parquet, "atif": _atif}


def _lost(run: ExportedRun) -> list[str]:
    """Return a message for each environment whose summary says that episodes have no reward."""
    return [
        f"{name}: {lost['episodes']} of {lost['of_episodes']} episodes have no reward and are left "
        f"out; {lost['tasks']} of {part['of_tasks']} tasks have no graded episode"
        for name, part in read_summary(run.folder).items()
        if name in run.tasks and (lost := part["lost"])["episodes"]
    ]
