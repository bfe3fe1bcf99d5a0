"""`ExportedRun`: a run on disk, as the exporters read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import FILE_NAME, read_episodes
from toolroll.rollout.runs.provenance import latest
from toolroll.rollout.runs.run_directory import read_run_file, refuse_no_run
from toolroll.rollout.types import Status


class ExportedRun:
    """The run in `folder`. If `env` is set, only this environment is read.

    Raise `UsageError` if `folder` is not a run, or if it does not have `env`.
    """

    def __init__(self, folder: Path, env: str | None = None) -> None:
        refuse_no_run(folder)
        self.folder = folder
        self.bad_lines: list[str] = []
        """A message for each line of the episode file that is not a valid episode."""
        tasks: dict[str, Counter[str]] = {}
        for episode in read_episodes(folder, on_bad_line=self.bad_lines.append):
            tasks.setdefault(episode.env, Counter())[episode.task_id] += 1
        if env is not None and env not in tasks:
            names = ", ".join(sorted(tasks)) or "no episodes"
            raise UsageError(f"--env {env!r}: {folder} has only {names}")
        self.tasks = {name: tasks[name] for name in sorted(tasks) if env in (None, name)}
        """The number of episodes of each task, for each environment to export."""
        self._run_file = read_run_file(folder)

    def episodes(self, env: str | None = None) -> Iterator[Episode]:
        """Yield the episodes of `env`, or of all environments to export."""
        for episode in read_episodes(self.folder, on_bad_line=lambda message: None):
            if episode.env in self.tasks and env in (None, episode.env):
                yield episode

    def settings(self, env: str) -> dict[str, Any]:
        """Return the settings of `env` in `run.json`, or {} if it has none."""
        return dict(self._run_file["environments"].get(env, {}))

    def provenance(self, env: str) -> dict[str, Any]:
        """Return the latest provenance of `env` in `run.json`. Its date is that of the first run,
        or if there is none, of the episode file.
        """
        written = datetime.fromtimestamp(int((self.folder / FILE_NAME).stat().st_mtime), UTC)
        history = self._run_file["provenance"].get(env) or [{"date": written.isoformat()}]
        return {**latest(history), "date": history[0]["date"]}


def is_graded(episode: Episode) -> bool:
    """Return True if `episode` has a reward and was not aborted."""
    return episode.result.reward is not None and episode.result.status is not Status.ABORTED
