"""`tau_bench_results`: converts a run to tau-bench's own format.

tau-bench infers the number of trials from the file and counts a missing trial as a failure. So a
task is written only if it has all its trials.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolroll.evaluation.export.exported_run import is_graded
from toolroll.rollout.types import Episode


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
