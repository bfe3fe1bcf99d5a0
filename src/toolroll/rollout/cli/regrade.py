"""`toolroll regrade`: replays a run in new environments, and writes it with the new rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from toolroll.rollout.cli.display import shortened
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.provenance import provenance
from toolroll.rollout.runs.registry import choose_tasks, load_environment
from toolroll.rollout.runs.regrade import KEY, Regrader
from toolroll.rollout.runs.report import report, write_summary
from toolroll.rollout.runs.run_directory import RunDirectory, read_settings, refuse_no_run
from toolroll.rollout.runs.runner import session_id
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import Episode, Status

_AT_ONCE = 16


async def regrade_folder(folder: Path, out: Path, target: str | None) -> list[str]:
    """Write the run in `folder` with new rewards to the new folder `out`. Return the messages to
    print.

    `target`: the environment, if its name in the run does not say where its file is.
    """
    refuse_no_run(folder)
    _refuse_existing(out)
    names = sorted({episode.env for episode in _episodes(folder)})
    if target is not None and len(names) > 1:
        raise UsageError(f"--env names one environment, and {folder} has {', '.join(names)}")
    return [line for name in names for line in await _regraded(folder, out, name, target or name)]


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise UsageError(f"--out {out} already exists: name a new folder")


@dataclass(slots=True)
class _Count:
    episodes: int = 0
    left_out: int = 0
    unlike: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def add(self, before: Episode, after: Episode) -> None:
        name = session_id(after.env, after.task_id, after.sample)
        self.episodes += 1
        if difference := after.result.info[KEY]["difference"]:
            self.unlike.append(f"{name} is not replayed alike: {difference}")
        if before.result.reward != after.result.reward:
            rewards = (before.result.reward, after.result.reward)
            old, new = ("none" if reward is None else f"{reward:g}" for reward in rewards)
            self.changed.append(f"{name}: the reward was {old} and is {new}")

    def lines(self, env: str) -> list[str]:
        alike = self.episodes - len(self.unlike)
        share = f" ({alike / self.episodes:.1%})" if self.episodes else ""
        first = (
            f"{env}: {self.episodes} episodes, {alike} replayed alike{share}, "
            f"{len(self.changed)} rewards changed"
        )
        left_out = f"{env}: {self.left_out} aborted episodes, or of tasks that are gone: left out"
        return [
            first,
            *([left_out] if self.left_out else []),
            *shortened(self.unlike),
            *shortened(self.changed),
        ]


async def _regraded(folder: Path, out: Path, env: str, target: str) -> list[str]:
    settings = read_settings(folder).get(env, {})
    factory = load_environment(target, settings.get("env_args"))
    tasks = {task.id: task for task in choose_tasks(factory, settings.get("split"), None)}
    now = await provenance(None, factory) | {"regraded": str(folder)}
    regrader, count = Regrader(factory, Threads(_AT_ONCE), settings), _Count()
    episodes = (episode for episode in _episodes(folder) if episode.env == env)
    with RunDirectory(out, env, settings, provenance=now) as directory:
        while batch := list(islice(episodes, _AT_ONCE)):
            graded = [
                episode
                for episode in batch
                if episode.task_id in tasks and episode.result.status is not Status.ABORTED
            ]
            count.left_out += len(batch) - len(graded)
            async with asyncio.TaskGroup() as group:
                replays = [
                    group.create_task(regrader.regrade(episode, tasks[episode.task_id]))
                    for episode in graded
                ]
            for episode, replay in zip(graded, replays, strict=True):
                directory.append(replay.result())
                count.add(episode, replay.result())
    part = report(directory.summary, settings=settings, provenance=directory.provenance)
    write_summary(out, {env: part})
    return count.lines(env)


def _episodes(folder: Path) -> Iterator[Episode]:
    return read_episodes(folder, on_bad_line=lambda message: None)
