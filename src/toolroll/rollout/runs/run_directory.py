"""`RunDirectory`: a run on disk, which can be killed at any moment and goes on where it stopped.

`episodes.jsonl` has one line for each finished (environment, task, sample), `run.json` the settings
that the episodes follow from. Invariants: one process at a time writes into a folder; no episode is
lost and none stands there twice; an aborted episode makes room for another attempt; settings that
would give other episodes are refused, with the difference.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import (
    FILE_NAME,
    EpisodeStore,
    Sync,
    cut_torn_line,
    read_episodes,
)
from toolroll.rollout.runs.runner import EpisodeKey
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.runtime.disk import written_whole
from toolroll.rollout.types import Episode, Status

SETTINGS_NAME = "run.json"
SCHEMA_VERSION = 1


class RunDirectory:
    """One environment's part of the folder `path`. A context manager, inside which `append` may be
    called.

    `settings`: plain data, all that the episodes follow from; `defaults` stand for what a folder of
    an older version does not name. Raises `UsageError` where the folder was written with other
    ones, or is being written by another process.
    """

    def __init__(
        self,
        path: Path,
        env: str,
        settings: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        sync: Sync = "end",
    ) -> None:
        self.path = path
        self.env = env
        self.summary = Summary(env)
        """What is there, and what is appended."""
        self.dropped = 0
        """Aborted episodes of an earlier run that were taken out, to be played again."""
        self.repaired = 0
        """Bytes of a torn last line that were cut off."""
        self._sync: Sync = sync
        self._settings = _plain(settings)
        self._defaults = _plain(defaults or {})
        self._store: EpisodeStore | None = None
        self._done: set[EpisodeKey] = set()

    @property
    def done(self) -> frozenset[EpisodeKey]:
        """What need not be played."""
        return frozenset(self._done)

    def append(self, episode: Episode) -> None:
        """Write one finished episode."""
        assert self._store is not None, "append outside the context"
        key = (episode.task_id, episode.sample)
        if key in self._done:
            raise UsageError(
                f"{episode.env}: task {episode.task_id}, sample {episode.sample} stands in "
                f"{self.path} already"
            )
        self._store.append(episode)
        self._done.add(key)
        self.summary.add(episode)

    def __enter__(self) -> RunDirectory:
        make_folder(self.path)
        refuse_other_files(self.path)
        self._lock = lock(self.path)
        try:
            self._agree()
            self.repaired = cut_torn_line(self.path / FILE_NAME)
            if self._read_finished():
                self._drop_aborted()
            self._store = EpisodeStore(self.path, sync=self._sync)
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._store is not None:
                self._store.close()
        finally:
            self._store = None
            os.close(self._lock)

    def _agree(self) -> None:
        """Compare the settings with those of the folder, or write them down."""
        file = self.path / SETTINGS_NAME
        known = read_settings(self.path)
        if self.env in known:
            different = difference(self._defaults | known[self.env], self._settings)
            if different:
                raise UsageError(
                    f"{self.path} was begun with other settings for {self.env}:\n  "
                    + "\n  ".join(different)
                    + "\nGive the same ones to go on, or another --out."
                )
            return
        if any(episode.env == self.env for episode in _episodes(self.path)):
            raise UsageError(
                f"{self.path} has episodes of {self.env}, and no {SETTINGS_NAME} says how they "
                f"came about: another --out"
            )
        write_whole(
            file,
            {"schema_version": SCHEMA_VERSION, "environments": known | {self.env: self._settings}},
        )

    def _read_finished(self) -> int:
        """Take in what is finished; how many episodes were aborted."""
        aborted = 0
        for episode in _episodes(self.path):
            if episode.env != self.env:
                continue
            key = (episode.task_id, episode.sample)
            if episode.result.status is Status.ABORTED:
                aborted += 1
            elif key not in self._done:
                self._done.add(key)
                self.summary.add(episode)
        return aborted

    def _drop_aborted(self) -> None:
        """Write the file without them; the old one stays until the new one is whole."""
        file = self.path / FILE_NAME
        with file.open("rb") as lines, written_whole(file, "Nothing was changed") as out:
            for line in lines:
                data = orjson.loads(line)
                if data["env"] == self.env and data["status"] == Status.ABORTED.value:
                    self.dropped += 1
                else:
                    out.write(line)


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """The settings in `run.json` by environment; {} where there is none. Raises `UsageError` for
    a file that cannot be read.
    """
    file = path / SETTINGS_NAME
    if not file.is_file():
        return {}
    try:
        data = orjson.loads(file.read_bytes())
        if data["schema_version"] != SCHEMA_VERSION:
            raise UsageError(
                f"{file} has schema version {data['schema_version']!r}; this toolroll reads "
                f"{SCHEMA_VERSION}"
            )
        return dict(data["environments"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} cannot be read ({error!r}): mend it, or choose another --out"
        ) from error


def difference(known: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """One line for each setting that differs: `name: there X, now Y`."""
    names = sorted({*known, *given})
    return [
        f"{name}: there {_shown(known, name)}, now {_shown(given, name)}"
        for name in names
        if known.get(name) != given.get(name)
    ]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    found: dict[str, Any] = orjson.loads(orjson.dumps(settings, default=str))
    return found


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return orjson.dumps(settings[name]).decode() if settings.get(name) is not None else "not set"


def make_folder(path: Path) -> None:
    """Make the folder that --out names. Raises `UsageError` where that cannot be, or where
    nothing can be written into it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(
            f"--out {path}: there is a file of that name; a folder is needed"
        ) from error
    except OSError as error:
        raise UsageError(f"--out {path}: the folder cannot be made ({error.strerror})") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--out {path}: nothing can be written into that folder")


def refuse_other_files(path: Path) -> None:
    """Raise `UsageError` if the folder `path` holds files, but no run."""
    if any((path / name).exists() for name in (SETTINGS_NAME, FILE_NAME)):
        return
    names = sorted(found.name for found in path.iterdir() if not found.name.startswith("."))
    if names:
        more = ", ..." if len(names) > 3 else ""
        raise UsageError(
            f"--out {path}: that folder is not a run, and holds other files "
            f"({', '.join(names[:3])}{more}): name a new or an empty folder"
        )


def lock(path: Path) -> int:
    """Take the folder for this process, until the returned descriptor is closed or the process
    ends, however it ends.
    """
    descriptor = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(
            f"another process is writing into {path}: wait for it, or choose another --out"
        ) from error
    return descriptor


def write_whole(file: Path, data: Any) -> None:
    """Write JSON into `file`: the old one or the new one is there, whatever happens."""
    with written_whole(file) as out:
        out.write(
            orjson.dumps(
                data,
                option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE,
            )
        )


def _episodes(path: Path) -> Iterator[Episode]:
    return read_episodes(path) if (path / FILE_NAME).is_file() else iter(())
