"""The episode file, with one JSON object per line. If a run is killed, at most the line that is
being written is lost.

Invariants: a line is completely written and flushed before the next episode is accepted. An
incomplete last line is removed when the file is reopened. Reading returns what was written,
including arrays and NaN (NaN is null in JSON).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from toolroll.rollout.episode import Episode, InteractionResult
from toolroll.rollout.errors import UsageError, capped
from toolroll.rollout.runtime.complaints import complaints
from toolroll.rollout.runtime.disk import sync_folder, writing
from toolroll.rollout.runtime.jsonable import json_bytes, plain
from toolroll.rollout.session.trajectory_json import Number, TrajectoryRecord, from_json, to_json
from toolroll.rollout.types import Status, StopReason

Sync = Literal["always", "end"]

SCHEMA_VERSION = 1
FILE_NAME = "episodes.jsonl"
_OF_EPISODE = (
    "env task_id task_index sample seed model task_hash expected_calls environment".split()
)
_OF_RESULT = (
    "status stop_reason reward step_rewards prompt messages tools trajectories metrics info".split()
)
_WHY = 300
_RESUME = "Finished episodes are kept; free some space, and run the same command again to continue"

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class EpisodeRecord(BaseModel):
    """One line of `episodes.jsonl`. Its numbers have the limits that they had when they were
    written, so that no line can make a sum infinite.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    schema_version: int = SCHEMA_VERSION
    env: str
    task_id: str
    task_index: Whole
    sample: Whole
    seed: Whole
    model: str = ""
    task_hash: str = ""
    expected_calls: list[dict[str, Any]] = []
    environment: str = ""
    status: Status
    stop_reason: StopReason
    reward: Number | None
    step_rewards: list[Number] = []
    prompt: str = ""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    trajectories: list[TrajectoryRecord]
    metrics: dict[str, Number]
    info: dict[str, Any]

    @model_validator(mode="after")
    def _check_status(self) -> Self:
        if self.status is not self.stop_reason.status:
            raise ValueError(f"the stop reason {self.stop_reason} has another status")
        return self


def to_line(episode: Episode) -> bytes:
    """Return the episode as one line of JSON. Values that JSON does not support become text
    (`json_bytes`).
    """
    return json_bytes(_record(episode), option=orjson.OPT_APPEND_NEWLINE)


def check_readable(result: InteractionResult) -> None:
    """Raise `ValueError` if `from_line` would refuse `result`. Its tokens are not checked."""
    parts = [replace(part, routed_experts=None) for part in result.trajectories]
    record = _record(Episode("", "", 0, 0, 0, replace(result, trajectories=tuple(parts))))
    for part in record["trajectories"]:
        part |= {"input_ids": [], "loss_mask": [], "logprobs": []}
    try:
        EpisodeRecord.model_validate(plain(record))
    except ValidationError as error:
        raise ValueError(f"asolve returned what cannot be stored: {complaints(error)}") from error


def _record(episode: Episode) -> dict[str, Any]:
    result = episode.result
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(episode, name) for name in _OF_EPISODE},
        **{name: getattr(result, name) for name in _OF_RESULT},
        "trajectories": [to_json(trajectory, arrays=True) for trajectory in result.trajectories],
    }


def from_line(line: bytes) -> Episode:
    """Return the episode that is in one line.

    Raise `UsageError` if the line has the number of a different schema version, and `ValueError` if
    it is not a valid episode.
    """
    data = orjson.loads(line)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        error = UsageError if isinstance(version, int) else ValueError
        raise error(
            f"the episode has schema version {version!r}; this toolroll reads {SCHEMA_VERSION}"
        )
    record = EpisodeRecord.model_validate(data)
    trajectories = tuple(map(from_json, record.trajectories))
    result = InteractionResult.of(
        trajectories,
        messages=record.messages,
        stop_reason=record.stop_reason,
        prompt=record.prompt,
        reward=record.reward,
        info=record.info,
        metrics=record.metrics,
        step_rewards=tuple(record.step_rewards),
        tools=record.tools,
    )
    return Episode(result=result, **{name: getattr(record, name) for name in _OF_EPISODE})


class EpisodeStore:
    """`episodes.jsonl` in `folder`, opened for appending. This is a context manager.

    `sync`: "always" calls fsync after each line, "end" only when the file is closed. `file`: an
    open file to write to instead. After a disk error nothing more is written, because a line after
    an incomplete one could not be read.
    """

    def __init__(self, folder: Path, *, sync: Sync = "end", file: BinaryIO | None = None) -> None:
        self.path = folder / FILE_NAME
        self._sync = sync
        self._failed = False
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            cut_torn_line(self.path)
            self._file = file or self.path.open("ab")
            self._size = os.fstat(self._file.fileno()).st_size
            sync_folder(folder)

    def append(self, episode: Episode) -> None:
        """Write one episode and flush it to the operating system, so that it survives if this
        process is killed.

        Raise `UsageError` if this fails.
        """
        line = to_line(episode)
        if self._failed:
            raise UsageError(f"{self.path}: an earlier write failed. {_RESUME}")
        try:
            with writing(self.path, _RESUME):
                self._file.write(line)
                self._file.flush()
                if self._sync == "always":
                    os.fsync(self._file.fileno())
            self._size += len(line)
            self._check_file()
        except UsageError:
            self._failed = True
            raise

    def _check_file(self) -> None:
        """Raise `UsageError` if another program has replaced, changed or removed the file."""
        current = self.path.stat() if self.path.exists() else None
        mine = os.fstat(self._file.fileno())
        if current is None or not os.path.samestat(current, mine) or current.st_size != self._size:
            raise UsageError(
                f"{self.path} was replaced, changed or removed while it was written, so finished "
                "episodes are missing: run the same command again to play them"
            )

    def close(self) -> None:
        """Flush to the disk and close the file.

        Raise `UsageError` if this fails, unless `append` has already raised it.
        """
        try:
            with writing(self.path, _RESUME):
                try:
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    if not self._failed:
                        self._check_file()
                finally:
                    self._file.close()
        except UsageError:
            if not self._failed:
                raise

    def __enter__(self) -> EpisodeStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def cut_torn_line(path: Path) -> int:
    """If the last line of `path` has no newline, remove it. Return the number of removed bytes."""
    if not path.exists():
        return 0
    size = path.stat().st_size
    with path.open("rb+") as file:
        keep = _after_last_newline(file, size)
        file.truncate(keep)
    return size - keep


def _after_last_newline(file: Any, size: int) -> int:
    block = 1 << 16
    end = size
    while end > 0:
        begin = max(0, end - block)
        file.seek(begin)
        position = file.read(end - begin).rfind(b"\n")
        if position >= 0:
            return int(begin + position + 1)
        end = begin
    return 0


def read_episodes(
    path: str | Path, *, on_bad_line: Callable[[str], None] | None = None
) -> Iterator[Episode]:
    """Yield the episodes in a file, or in the folder that contains the file.

    An incomplete last line and repeated lines are skipped. If another line is not a valid episode,
    or has the sample of an earlier one, raise `UsageError`, or call `on_bad_line` with the error's
    message and continue. If there is no such file, or if a line has a different schema version,
    always raise `UsageError`.
    """
    file = Path(path)
    file = file / FILE_NAME if file.is_dir() else file
    if not file.exists():
        raise UsageError(
            f"{path} is neither the folder of a run (--out of toolroll run) nor its {FILE_NAME}"
        )
    with file.open("rb") as lines:
        yield from read_lines(lines, on_bad_line=on_bad_line)


def read_lines(
    lines: BinaryIO, *, on_bad_line: Callable[[str], None] | None = None
) -> Iterator[Episode]:
    """Yield the episodes in an open file, as `read_episodes` does. Then the file is at the start of
    an incomplete last line.
    """
    seen: set[bytes] = set()
    samples: set[tuple[str, str, int]] = set()
    for number in count(1):
        if not (line := lines.readline()).endswith(b"\n"):
            lines.seek(-len(line), os.SEEK_CUR)
            return
        digest = hashlib.blake2b(line, digest_size=16).digest()
        if digest in seen:
            continue
        seen.add(digest)
        try:
            episode = from_line(line)
            sample = (episode.env, episode.task_id, episode.sample)
            if sample in samples:
                raise ValueError(
                    f"an earlier line has the same sample, {'/'.join(map(str, sample))}"
                )
            samples.add(sample)
        except UsageError as error:
            raise UsageError(f"{lines.name}, line {number}: {error}") from error
        except ValueError as error:
            # not JSON, or not an episode (pydantic's ValidationError is a ValueError)
            why = complaints(error) if isinstance(error, ValidationError) else str(error)
            why = capped(" ".join(why.split()), _WHY)
            message = f"{lines.name}, line {number}, is not a valid episode: {why}"
            if on_bad_line is None:
                raise UsageError(message) from error
            on_bad_line(message)
        else:
            yield episode
