"""`tau_bench_results`: converts a run to tau-bench's own format.

tau-bench infers the number of trials from the file and counts a missing trial as a failure. So a
task is written only if it has all its trials.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolroll.rollout.types import Episode, Status


def tau_bench_results(episodes: Iterable[Episode]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return tau-bench's `EnvRunResult`s, ordered by trial and task, and the ids of the tasks that
    are left out because some or all of their trials are missing.

    `episodes` must belong to one environment.
    """
    graded: list[Episode] = []
    by_task: dict[str, set[int]] = {}
    for found in episodes:
        samples = by_task.setdefault(found.task_id, set())
        if found.result.reward is not None and found.result.status is not Status.ABORTED:
            graded.append(found)
            samples.add(found.sample)
    trials = {found.sample for found in graded}
    whole = {task for task, samples in by_task.items() if samples == trials}
    kept = sorted(
        (found for found in graded if found.task_id in whole),
        key=lambda found: (found.sample, found.task_index),
    )
    return [_result(found) for found in kept], sorted(by_task.keys() - whole)


def _result(episode: Episode) -> dict[str, Any]:
    result = episode.result
    return {
        "task_id": episode.task_index,
        "reward": result.reward,
        "info": result.info,
        "traj": result.messages,
        "trial": episode.sample,
    }
