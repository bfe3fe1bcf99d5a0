"""`toolroll regrade`: replays a run in new environments, and writes it with the new rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolroll.cli.display import shortened
from toolroll.endpoint.sessions.session_store import ENV as SESSIONS
from toolroll.evaluation.do_nothing import play_floor
from toolroll.evaluation.environment_identity import environment_identity, imported_packages
from toolroll.evaluation.files_read import FilesRead
from toolroll.evaluation.recorded_run import RecordedRun, recorded_runs, refuse_code
from toolroll.evaluation.regrade import KEY, Regrader
from toolroll.evaluation.report import read_summary, report, write_summary
from toolroll.rollout.environment import EnvironmentFactory
from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.provenance import provenance
from toolroll.rollout.runs.registry import choose_tasks, load_environment
from toolroll.rollout.runs.run_directory import (
    SETTINGS_NAME,
    RunDirectory,
    refuse_no_run,
    unfinished,
)
from toolroll.rollout.runs.runner import EpisodeKey, session_id
from toolroll.rollout.runtime.targets import absolute_target
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import Status


async def regrade_folder(
    folder: Path, out: Path, target: str | None, *, trust: bool = False
) -> tuple[list[str], int]:
    """Write the run in `folder` with new rewards to the new folder `out`. Return the messages to
    print, and the number of episodes that had a reward and have none now.

    `target`: the environment. Without it, or `trust`, no file that `run.json` names is executed.
    """
    refuse_no_run(folder)
    _refuse_existing(out)
    bad_lines: list[str] = []
    ended: dict[str, dict[EpisodeKey, bool]] = {}  # False: aborted
    for episode in read_episodes(folder, on_bad_line=bad_lines.append):
        key = episode.task_id, episode.sample
        ended.setdefault(episode.env, {})[key] = episode.result.status is not Status.ABORTED
    names = sorted(ended)
    if target is not None and len(names) > 1:
        raise UsageError(f"--env names one environment, and {folder} has {', '.join(names)}")
    recorded = recorded_runs(folder)
    runs = {name: _replayable(folder, name, recorded) for name in names}
    for name, run in runs.items() if target is None and not trust else ():
        refuse_code({"env": name, **run.values}, ["env"], how="give --env FILE.py:NAME")
    results = [
        await _regraded(folder, out, name, run, target, ended[name]) for name, run in runs.items()
    ]
    counts = {name: len(episodes) for name, episodes in ended.items()}
    lines = [f"{name}: {line}" for name, line in unfinished(folder, counts).items()]
    lines += [line for part, _ in results for line in part]
    return [*lines, *shortened(bad_lines)], sum(lost for _, lost in results)


def _replayable(folder: Path, env: str, runs: Mapping[str, RecordedRun]) -> RecordedRun:
    """Return the run of `env`. Raise `UsageError` if its actions are not recorded."""
    if env not in runs:
        raise UsageError(
            f"{folder} has episodes of {env}, but no {SETTINGS_NAME} with its settings"
        )
    if env == SESSIONS:
        raise UsageError(f"{folder} cannot be graded again: its sessions have no environment")
    if runs[env].settings.get("agent") == "program":
        raise UsageError(f"{folder} cannot be graded again: what its programs did is not recorded")
    return runs[env]


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise UsageError(f"--out {out} already exists: name a new folder")


async def _regraded(
    folder: Path,
    out: Path,
    env: str,
    run: RecordedRun,
    target: str | None,
    ended: Mapping[EpisodeKey, bool],
) -> tuple[list[str], int]:
    values = {"env": env, **run.values}
    source = target or values["env"]
    read = FilesRead(source)
    factory = _loaded(target, values)
    all_tasks = choose_tasks(factory, values.get("split"), None)
    tasks = {task.id: task for task in all_tasks}
    identity = environment_identity(source, factory, all_tasks)
    now_read = {"packages": imported_packages(source), "read": {}}
    settings = {**run.settings, "environment": identity, **now_read}
    now = {**run.provenance, **await provenance(None, factory), "regraded": str(folder)}
    if target is not None:
        now["options"] = {**now.get("options", {}), "env": absolute_target(target)}
    had_floor = read_summary(folder).get(env, {}).get("do_nothing") is not None
    regrader = Regrader(factory, Threads(1), values)
    unlike: list[str] = []
    changed: list[str] = []
    lost = 0
    planned = Counter(task_id for task_id, _ in ended)
    again = [key for key, whole in ended.items() if whole and key[0] in tasks]
    with RunDirectory(out, env, settings, provenance=now, planned=again) as directory:
        for recorded in read_episodes(folder, on_bad_line=lambda message: None):
            if recorded.env != env:
                continue
            had_reward = recorded.result.reward is not None
            if recorded.task_id not in tasks or recorded.result.status is Status.ABORTED:
                lost += had_reward
                continue
            episode = await regrader.regrade(recorded, tasks[recorded.task_id])
            directory.keep_read(read.hashes())
            directory.append(episode)
            lost += had_reward and episode.result.reward is None
            _compare(episode, unlike, changed)
    summary, history = directory.summary, directory.provenance
    floor = None
    if had_floor:
        left = [tasks[name] for name in planned if name in tasks]
        floor = await play_floor(factory, left, values)
    part = report(summary, floor=floor, settings=settings, planned=planned, provenance=history)
    write_summary(out, {env: part})
    alike = summary.episodes - len(unlike)
    lines = [
        f"{env}: episodes: {summary.episodes}, replayed alike: {alike} "
        f"({alike / max(1, summary.episodes):.1%}), rewards changed: {len(changed)}"
    ]
    if left_out := planned.total() - summary.episodes:
        lines.append(f"{env}: left out, because aborted or of tasks that are gone: {left_out}")
    if lost:
        lines.append(f"{env}: had a reward, and have none now: {lost}")
    return [*lines, *shortened(unlike), *shortened(changed)], lost


def _loaded(target: str | None, values: Mapping[str, Any]) -> EnvironmentFactory:
    try:
        return load_environment(target or values["env"], values.get("env_args"))
    except UsageError as error:
        if target is not None:
            raise
        raise UsageError(f"{error}; if it was moved: --env FILE.py:NAME") from error


def _compare(episode: Episode, unlike: list[str], changed: list[str]) -> None:
    """Add a line to `unlike` if the replay differed, and one to `changed` if the reward did."""
    name, again = session_id(episode.env, episode.task_id, episode.sample), episode.result
    if difference := again.info[KEY]["difference"]:
        unlike.append(f"{name} is not replayed alike: {difference}")
    if again.reward != again.info[KEY]["reward"]:
        changed.append(f"{name}: the reward was {again.info[KEY]['reward']} and is {again.reward}")
