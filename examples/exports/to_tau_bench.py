"""Write a run as a file of tau-bench's own results, for its `display_metrics`:

    python examples/exports/to_tau_bench.py out/retail results.json

tau-bench infers the number of trials from the file and counts a missing trial as a failure. So a
task is written only if it has all its trials.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from toolroll import Episode, UsageError
from toolroll.evaluation.export.exported_run import ExportedRun, is_graded
from toolroll.rollout.runtime.disk import written_whole
from toolroll.rollout.runtime.jsonable import json_bytes


def tau_bench_results(episodes: Iterable[Episode]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return tau-bench's `EnvRunResult`s, ordered by trial and task, and the ids of the tasks that
    are left out because some or all of their trials are missing.

    `episodes` must belong to one environment.
    """
    graded: list[Episode] = []
    by_task: dict[str, set[int]] = {}
    for episode in episodes:
        samples = by_task.setdefault(episode.task_id, set())
        if is_graded(episode):
            graded.append(episode)
            samples.add(episode.sample)
    trials = {episode.sample for episode in graded}
    whole = {task for task, samples in by_task.items() if samples == trials}
    complete = sorted(
        (episode for episode in graded if episode.task_id in whole),
        key=lambda episode: (episode.sample, episode.task_index),
    )
    return [_result(episode) for episode in complete], sorted(by_task.keys() - whole)


def _result(episode: Episode) -> dict[str, Any]:
    result = episode.result
    return {
        "task_id": episode.task_index,
        "reward": result.reward,
        "info": result.info,
        "traj": result.messages,
        "trial": episode.sample,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the run that the `arguments` of the command line name."""
    parser = argparse.ArgumentParser(description="Write a run as a file of tau-bench's results.")
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("out", type=Path, help="a new file")
    parser.add_argument("--env", help="export only this environment")
    given = parser.parse_args(arguments)
    run = ExportedRun(given.run, given.env)
    if len(run.tasks) > 1:
        names = ", ".join(run.tasks)
        raise UsageError(
            f"tau-bench's format holds one environment: choose one with --env: {names}"
        )
    if given.out.exists():
        raise UsageError(f"{given.out} already exists: name a new file")
    results, left_out = tau_bench_results(run.episodes())
    with written_whole(given.out) as file:
        file.write(json_bytes(results, option=orjson.OPT_INDENT_2))
    print(*run.bad_lines, f"{given.out}: {len(results)} results", sep="\n")
    if left_out:
        print("left out, because a trial is missing:", ", ".join(left_out))


if __name__ == "__main__":
    main()
