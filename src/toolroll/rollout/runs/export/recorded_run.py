"""`RecordedRun`: a run on disk, as the exporters read it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from statistics import stdev
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import FILE_NAME, read_episodes
from toolroll.rollout.runs.provenance import latest
from toolroll.rollout.runs.report import read_summary
from toolroll.rollout.runs.run_directory import read_run_file, refuse_no_run
from toolroll.rollout.runtime.disk import writing
from toolroll.rollout.runtime.jsonable import finite
from toolroll.rollout.types import Episode, Status


@dataclass
class RecordedRun:
    """The run in `folder`. If `env` is set, only this environment is read.

    `bad_lines` gets a message for each line of the episode file that is not a valid episode.
    Raise `UsageError` if `folder` is not a run, or if it does not have `env`.
    """

    folder: Path
    env: str | None = None
    bad_lines: list[str] = field(default_factory=list)
    tasks: dict[str, set[str]] = field(init=False)
    """The ids of the tasks of each environment to export."""

    def __post_init__(self) -> None:
        refuse_no_run(self.folder)
        tasks: dict[str, set[str]] = {}
        for episode in self._read(self.bad_lines.append):
            tasks.setdefault(episode.env, set()).add(episode.task_id)
        if self.env is not None and self.env not in tasks:
            raise UsageError(
                f"--env {self.env!r}: {self.folder} has only "
                f"{', '.join(sorted(tasks)) or 'no episodes'}"
            )
        self.tasks = {name: tasks[name] for name in sorted(tasks) if self.env in (None, name)}

    def episodes(self, env: str | None = None) -> Iterator[Episode]:
        """Yield the episodes of the environment `env`, or of all environments to export. Raise
        `UsageError` if a reward is not finite.
        """
        for episode in self._read(lambda message: None):  # `bad_lines` has them
            if episode.env in self.tasks and env in (None, episode.env):
                if episode.result.reward is not None and finite(episode.result.reward) is None:
                    raise UsageError(f"{label(episode)}: its reward is not a finite number")
                yield episode

    def _read(self, on_bad_line: Callable[[str], None]) -> Iterator[Episode]:
        return read_episodes(self.folder, on_bad_line=on_bad_line)

    @cached_property
    def _run_file(self) -> dict[str, Any]:
        return read_run_file(self.folder)

    def settings(self, env: str) -> dict[str, Any]:
        """Return the settings of `env` in `run.json`, or {} if it has none."""
        settings: dict[str, Any] = self._run_file["environments"].get(env, {})
        return settings

    def provenance(self, env: str) -> dict[str, Any]:
        """Return the latest provenance of `env`, with the date of the first run."""
        history = self._run_file["provenance"].get(env, [])
        return {**latest(history), "date": self.started(env).isoformat()}

    def started(self, env: str) -> datetime:
        """Return when the first run of `env` started. If `run.json` does not say it, return when
        the episode file was last written.
        """
        history = self._run_file["provenance"].get(env)
        if history:
            return datetime.fromisoformat(history[0]["date"])
        written = (self.folder / FILE_NAME).stat().st_mtime
        return datetime.fromtimestamp(int(written), UTC)


    def ended(self, env: str) -> datetime | None:
        """Return when the run of `env` ended, or None if `summary.json` does not have its time."""
        seconds = read_summary(self.folder).get(env, {}).get("seconds")
        return self.started(env) + timedelta(seconds=seconds) if seconds else None


def label(episode: Episode) -> str:
    """Return the name of `episode` for a message."""
    return f"{episode.env}, task {episode.task_id}, sample {episode.sample}"


def is_graded(episode: Episode) -> bool:
    """Return True if `episode` has a reward and was not aborted."""
    return episode.result.reward is not None and episode.result.status is not Status.ABORTED


def file_part(name: str, between: str = "-") -> str:
    """Return `name` as a part of a file's name: `between` replaces other characters than letters,
    digits, `.`, `-` and `_`.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", between, name)


def standard_error(means: Sequence[float]) -> float | None:
    """Return the standard error of the mean over tasks, or None if there is only one task."""
    return stdev(means) / len(means) ** 0.5 if len(means) > 1 else None


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Create `folder`. If the `with` block fails, remove it.

    Raise `UsageError` if `folder` exists, or if it or a file in it cannot be written.
    """
    if folder.exists():
        raise UsageError(f"{folder} already exists")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot create {folder}: {error.strerror}") from error
    try:
        with writing(folder, "The incomplete folder is removed"):
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
