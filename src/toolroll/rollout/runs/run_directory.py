"""`RunDirectory`: a run on disk that can be killed at any moment and resumed.

`episodes.jsonl` has one line per finished (environment, task, sample). `run.json` contains the
settings that determine the episodes.

Invariants:

- Only one process at a time writes into a folder.
- No episode is lost or stored twice. An aborted episode is replaced with another attempt.
- A run whose settings would give different episodes is refused. The error lists the differences.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import UsageError, capped
from toolroll.rollout.runs.episode_file import (
    FILE_NAME,
    EpisodeStore,
    Sync,
    cut_torn_line,
    from_line,
    read_episodes,
)
from toolroll.rollout.runs.provenance import Provenance, extended
from toolroll.rollout.runs.runner import EpisodeKey
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.runtime.complaints import complaints
from toolroll.rollout.runtime.disk import lock, written_whole
from toolroll.rollout.runtime.jsonable import plain
from toolroll.rollout.types import Status

SETTINGS_NAME = "run.json"
SCHEMA_VERSION = 1
_WHY = 300
_REGRADE = " `toolroll regrade` gives recorded episodes the rewards of changed code."
_PARTED = frozenset(("environment", "packages", "read"))


class _Settings(BaseModel):
    """The settings of an environment. Those that are read have a type."""

    model_config = ConfigDict(strict=True, extra="allow")

    env: str | None = None
    model: str | None = None
    agent: str | None = None
    split: str | None = None
    env_args: dict[str, Any] | None = None
    agent_args: dict[str, Any] | None = None
    user_model: str | None = None


class _Provenance(BaseModel):
    date: str
    options: _Settings = _Settings()


class RunFile(BaseModel):
    """`run.json`. `planned`: the number of episodes that the run of each environment is to have."""

    environments: dict[str, _Settings]
    provenance: dict[str, list[_Provenance]] = {}
    planned: dict[str, NonNegativeInt] = {}


class RunDirectory:
    """One environment's part of the run in the folder `path`. This is a context manager: call
    `append` inside it.

    `settings`: everything that determines the episodes, as plain data. `provenance`: from
    `toolroll.rollout.runs.provenance`. `run.json` contains the first run's provenance and, for each
    later run, the values that changed.

    `bound_when_empty`: refuse different settings even if the folder has no finished episode. Use it
    if other files in the folder depend on the settings. `planned`: the episodes that the run is to
    have; `run.json` has their number.

    Raises `UsageError` if the folder was written with different settings, or if another process is
    writing into it.
    """

    def __init__(
        self,
        path: Path,
        env: str,
        settings: Mapping[str, Any],
        *,
        sync: Sync = "end",
        provenance: Provenance | None = None,
        bound_when_empty: bool = False,
        planned: Collection[EpisodeKey] = (),
    ) -> None:
        self.path = path
        self.env = env
        self.summary = Summary(env)
        """Covers the episodes that were in the folder and the episodes that were appended."""
        self.dropped = 0
        """The number of aborted episodes that were removed when the folder was opened, so that they
        are retried.
        """
        self.bad_lines: list[str] = []
        """A message for each line of the episode file that is not a valid episode. Such a line
        remains in the file, and its episode is played again.
        """
        self.provenance: list[Provenance] = []
        """The first run's provenance, then the values that changed in later runs."""
        self._planned = planned
        self._now = plain(provenance) if provenance else None
        self._sync: Sync = sync
        self._bound_when_empty = bound_when_empty
        self._settings: dict[str, Any] = plain(settings)
        self._environment = _digest(settings.get("environment"))
        self._store: EpisodeStore | None = None
        self._done: set[EpisodeKey] = set()

    @property
    def done(self) -> frozenset[EpisodeKey]:
        """The keys of the finished episodes."""
        return frozenset(self._done)

    def append(self, episode: Episode) -> None:
        """Write one finished episode."""
        assert self._store is not None, "append outside the context"
        key = (episode.task_id, episode.sample)
        if key in self._done:
            raise UsageError(
                f"{episode.env}: task {episode.task_id}, sample {episode.sample} is already "
                f"in {self.path}"
            )
        self._store.append(replace(episode, environment=self._environment))
        self._done.add(key)
        self.summary.add(episode)

    def keep_read(self, read: Mapping[str, str]) -> None:
        """Add the hashes of the files that the environment `read` to `run.json`."""
        if not read.items() <= self._settings.get("read", {}).items():
            self._settings["read"] = {**self._settings.get("read", {}), **read}
            parts = read_run_file(self.path)
            parts["environments"][self.env] = self._settings
            _write_run_file(self.path, parts)

    def __enter__(self) -> RunDirectory:
        make_folder(self.path)
        refuse_other_files(self.path)
        self._lock = lock_folder(self.path)
        try:
            self._agree()
            cut_torn_line(self.path / FILE_NAME)
            if self._read_finished():
                self._drop_aborted()
            self._store = EpisodeStore(self.path, sync=self._sync)
            if self._planned:
                self._note_planned()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._store is not None:
                self._store.close()
        finally:
            self._store = None
            os.close(self._lock)

    def _note_planned(self) -> None:
        """Say in `run.json` how many episodes the run is to have."""
        parts = read_run_file(self.path)
        if self.env in parts["environments"]:
            parts["planned"][self.env] = len(self._done.union(self._planned))
            _write_run_file(self.path, parts)

    def _agree(self) -> None:
        """Compare the run's settings with those in `run.json`. If `run.json` has none for this
        environment, or different ones, store the run's settings. But raise `UsageError` if the
        folder already has finished episodes of this environment, or if the settings differ and
        `bound_when_empty` is set. Also store the run's provenance.
        """
        run_file = read_run_file(self.path)
        environments, written = run_file["environments"], run_file["provenance"]
        recorded = environments.get(self.env)
        different = difference(recorded or {}, self._settings)
        if recorded is None or different:
            if any(_finished(self.path, self.env)) or (
                recorded is not None and self._bound_when_empty
            ):
                raise UsageError(
                    f"{self.path} has episodes of {self.env}, but no {SETTINGS_NAME} with their "
                    f"settings: choose another --out"
                    if recorded is None
                    else f"{self.path} was started with other settings for {self.env}:\n  "
                    + "\n  ".join(different)
                    + "\nUse the same settings to continue, or choose another --out."
                    + (_REGRADE if "environment: code" in "\n".join(different) else "")
                )
            recorded = None
            environments.pop(self.env, None)
            written.pop(self.env, None)
        self.provenance = list(written.get(self.env, ()))
        if self._now is not None:
            self.provenance = extended(self.provenance, self._now)
        if recorded is None or self.provenance != written.get(self.env, []):
            provenance = {**written, self.env: self.provenance} if self.provenance else written
            parts = {
                "environments": {self.env: self._settings} | environments,
                "provenance": provenance,
            }
            _write_run_file(self.path, run_file | parts)

    def _read_finished(self) -> int:
        """Read the episodes of this environment. Return the number of aborted ones."""
        aborted = 0
        for episode in _stored(self.path, self.env, self.bad_lines.append):
            key = (episode.task_id, episode.sample)
            if episode.result.status is Status.ABORTED:
                aborted += 1
            elif key not in self._done:
                self._done.add(key)
                self.summary.add(episode)
        return aborted

    def _drop_aborted(self) -> None:
        """Rewrite the episode file without this environment's aborted episodes. The old file
        remains until the new one is complete.
        """
        file = self.path / FILE_NAME
        with file.open("rb") as lines, written_whole(file, "Nothing was changed") as out:
            for line in lines:
                try:
                    episode = from_line(line)
                    aborted = episode.result.status is Status.ABORTED and episode.env == self.env
                except ValueError:  # in `bad_lines`
                    aborted = False
                self.dropped += aborted
                if not aborted:
                    out.write(line)


def is_complete(path: Path, env: str, planned: Collection[EpisodeKey]) -> bool:
    """Return True if the folder `path` has each of the `planned` episodes of `env`, not aborted."""
    file = path / FILE_NAME
    if not file.is_file():
        return False
    with file.open("rb") as lines:
        if sum(1 for _ in lines) < len(planned):  # reading the episodes takes much longer
            return False
    return set(planned) <= set(_finished(path, env))


def _finished(path: Path, env: str) -> Iterator[EpisodeKey]:
    """Yield the keys of the stored episodes of `env` that were not aborted."""
    for episode in _stored(path, env, lambda message: None):
        if episode.result.status is not Status.ABORTED:
            yield episode.task_id, episode.sample


def _stored(path: Path, env: str, on_bad_line: Callable[[str], None]) -> Iterator[Episode]:
    """Yield the stored episodes of `env`."""
    if (path / FILE_NAME).is_file():
        stored = read_episodes(path, on_bad_line=on_bad_line)
        yield from (episode for episode in stored if episode.env == env)


def _digest(identity: Mapping[str, str] | None) -> str:
    """Return one hash of `identity`, or "" if there is none."""
    if not identity:
        return ""
    return hashlib.sha256(orjson.dumps(sorted(identity.items()))).hexdigest()[:16]


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings in `run.json` by environment, or {} if there is no such file.

    Raise `UsageError` if the file cannot be read.
    """
    settings: dict[str, dict[str, Any]] = read_run_file(path)["environments"]
    return settings


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the parts of `run.json`, as `RunFile` has them. They are empty if there is no such
    file. Raise `UsageError` if it cannot be read.
    """
    file = path / SETTINGS_NAME
    empty: dict[str, Any] = {name: {} for name in RunFile.model_fields}
    if not file.is_file():
        return empty
    try:
        data = orjson.loads(file.read_bytes())
        if data["schema_version"] != SCHEMA_VERSION:
            raise UsageError(
                f"{file} has schema version {data['schema_version']!r}; this toolroll reads "
                f"{SCHEMA_VERSION}"
            )
        RunFile.model_validate(data)
        return empty | {name: data[name] for name in empty if name in data}
    except (KeyError, TypeError, ValueError) as error:
        why = complaints(error) if isinstance(error, ValidationError) else repr(error)
        raise UsageError(
            f"{file} cannot be read ({capped(why, _WHY)}): repair it, or choose another --out"
        ) from error


def _write_run_file(path: Path, parts: Mapping[str, Any]) -> None:
    noted = {name: part for name, part in parts.items() if part or name != "planned"}
    write_whole(path / SETTINGS_NAME, {"schema_version": SCHEMA_VERSION, **noted})


def unfinished(path: Path, counts: Mapping[str, int]) -> dict[str, str]:
    """Return, for each environment whose run in the folder `path` is to have more episodes than in
    `counts`, a text that says so.
    """
    return {
        env: f"the run is not finished: {counts.get(env, 0)} of {planned} episodes"
        for env, planned in read_run_file(path)["planned"].items()
        if counts.get(env, 0) < planned
    }


def difference(
    recorded: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    sides: tuple[str, str] = ("recorded", "now"),
) -> list[str]:
    """Return one line for each setting that differs: `name: recorded X, now Y`. `sides`: what X and
    Y are called. Of the parts of the environment, name those that differ.
    """
    lines = []
    for name in sorted({*recorded, *current}):
        values = recorded.get(name), current.get(name)
        if name in _PARTED and all(isinstance(value, Mapping) for value in values):
            parts = difference(*values, sides=sides)  # type: ignore[arg-type]
            lines += [f"{name}: {line}" for line in parts]
        elif values[0] != values[1]:
            shown = (_shown(recorded, name), _shown(current, name))
            lines.append(f"{name}: {sides[0]} {shown[0]}, {sides[1]} {shown[1]}")
    return lines


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return orjson.dumps(settings[name]).decode() if settings.get(name) is not None else "not set"


def make_folder(path: Path) -> None:
    """Create the folder that --out names. Raise `UsageError` if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"--out {path} is a file; choose a folder") from error
    except OSError as error:
        raise UsageError(f"--out {path}: cannot create the folder ({error.strerror})") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--out {path}: the folder is not writable")


def refuse_other_files(path: Path) -> None:
    """Raise `UsageError` if the folder `path` contains files but is not a run."""
    if any((path / name).exists() for name in (SETTINGS_NAME, FILE_NAME)):
        return
    names = sorted(file.name for file in path.iterdir() if not file.name.startswith("."))
    if names:
        more = ", ..." if len(names) > 3 else ""
        raise UsageError(
            f"--out {path}: that folder is not a run, and holds other files "
            f"({', '.join(names[:3])}{more}): name a new or an empty folder"
        )


def refuse_no_run(path: Path) -> None:
    """Raise `UsageError` if the folder `path` has no episode file."""
    if not (path / FILE_NAME).is_file():
        problem = "is not a folder" if path.is_file() else f"holds no {FILE_NAME}"
        raise UsageError(f"{path} {problem}: give the folder of a run (--out of toolroll run)")


def lock_folder(path: Path) -> int:
    """Lock the folder for this process until the returned file descriptor is closed or the process
    ends. Raise `UsageError` if another process has locked it.
    """
    descriptor = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        lock(descriptor)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(
            f"another process is writing into {path}: wait for it, or choose another --out"
        ) from error
    return descriptor


def write_whole(file: Path, data: Any) -> None:
    """Replace `file` atomically with `data` as JSON."""
    with written_whole(file) as out:
        out.write(
            orjson.dumps(
                data,
                option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE,
            )
        )
