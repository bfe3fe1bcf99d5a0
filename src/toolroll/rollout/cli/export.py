"""`toolroll export`: writes a run in another format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from toolroll.rollout.cli.display import shortened
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.export import tau_bench_results, write_dataset
from toolroll.rollout.runs.report import read_summary
from toolroll.rollout.runs.run_directory import refuse_no_run
from toolroll.rollout.runtime.disk import written_whole
from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.types import Episode

FORMATS = ("parquet", "tau-bench")


def export(folder: Path, kind: str, out: Path, env: str | None) -> list[str]:
    """Write the run in `folder` to `out`. Return the messages to print.

    `kind`: one of `FORMATS`. `env`: export only this environment.
    """
    if kind not in FORMATS:
        raise UsageError(f"--format {kind!r}: the formats are {', '.join(FORMATS)}")
    refuse_no_run(folder)
    bad_lines: list[str] = []
    names = {episode.env for episode in read_episodes(folder, on_bad_line=bad_lines.append)}
    if env is not None and env not in names:
        raise UsageError(
            f"--env {env!r}: {folder} has only {', '.join(sorted(names)) or 'no episodes'}"
        )
    if kind == "parquet":
        count = write_dataset(_episodes(folder, env), out)
        lines = [f'{out}: {count} training samples; datasets.load_dataset("{out}") reads them']
        return lines + _lost(folder, env) + shortened(bad_lines)
    return _tau_bench(folder, out, env) + shortened(bad_lines)


def _tau_bench(folder: Path, out: Path, env: str | None) -> list[str]:
    episodes = list(_episodes(folder, env))
    names = {episode.env for episode in episodes}
    if len(names) > 1:
        raise UsageError(
            f"tau-bench's format holds one environment: choose one with --env: "
            f"{', '.join(sorted(names))}"
        )
    results, left_out = tau_bench_results(episodes)
    if out.exists():
        raise UsageError(f"{out} already exists")
    text = json_bytes(results, option=orjson.OPT_INDENT_2)
    with written_whole(out) as file:
        file.write(text)
    written = len({result["task_id"] for result in results})
    messages = [
        f"{out}: {len(results)} results of {written} of {written + len(left_out)} tasks"
        if left_out
        else f"{out}: {len(results)} results of {written} tasks"
    ]
    if left_out:
        messages.append(f"left out, because a trial is missing: {', '.join(left_out)}")
    return messages + _lost(folder, env)


def _lost(folder: Path, env: str | None) -> list[str]:
    """Return a message for each environment whose summary says that episodes have no reward."""
    return [
        f"{name}: {lost['episodes']} of {lost['of_episodes']} episodes have no reward and are left "
        f"out; {lost['tasks']} of {part['of_tasks']} tasks have no graded episode"
        for name, part in read_summary(folder).items()
        if env in (None, name) and (lost := part["lost"])["episodes"]
    ]


def _episodes(folder: Path, env: str | None) -> Iterator[Episode]:
    stored = read_episodes(folder, on_bad_line=lambda message: None)  # `export` reports them
    return (episode for episode in stored if env is None or episode.env == env)
