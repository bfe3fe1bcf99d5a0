"""Write either a whole file or nothing, and convert disk errors to messages."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from toolroll.rollout.errors import UsageError


def lock(descriptor: int) -> None:
    """Lock a file until the descriptor is closed. Raise `BlockingIOError` if another process has
    locked it, and `OSError` on Windows.
    """
    if sys.platform == "win32":
        raise OSError("files cannot be locked on Windows")
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def writing(path: Path, advice: str = "") -> Iterator[None]:
    """Convert an `OSError` (a full disk, for example) to a `UsageError` that names `path` and the
    cause.

    `advice` is appended to the message.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(
            f"{path} cannot be written: {why}{f'. {advice}' if advice else ''}"
        ) from error


class _Draft(io.FileIO):
    """The temporary file `draft`. Its write errors name `path`, which is the file that it will
    replace.
    """

    def __init__(self, draft: Path, path: Path, advice: str) -> None:
        super().__init__(draft, "xb")
        self._path = path
        self._advice = advice

    def write(self, data: Any, /) -> int:
        with writing(self._path, self._advice):
            return super().write(data)


@contextmanager
def written_whole(path: Path, advice: str = "") -> Iterator[BinaryIO]:
    """Open a temporary file. If the `with` block ends without an error, sync the file to disk,
    replace `path` with it, and sync the folder.

    If writing fails, `path` is unchanged, and `UsageError` is raised. Other errors of the `with`
    block are raised as they are. If only the sync of the folder fails, `UsageError` is raised too,
    but `path` is already the new file, which may not survive a power loss.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} cannot be written: it is not a regular file")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with writing(path, advice):
            raw = _Draft(draft, path, advice)
        with io.BufferedWriter(raw) as file:
            yield file
            with writing(path, advice):
                file.flush()
                os.fsync(file.fileno())
        with writing(path, advice):
            draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    with writing(path):  # without `advice`: it describes the old file
        sync_folder(path.parent)


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Create `folder`. If the `with` block fails, remove it.

    Raise `UsageError` if `folder` exists, or if it or a file in it cannot be written.
    """
    if folder.exists():
        raise UsageError(f"{folder} already exists: name a new folder")
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


def sync_folder(folder: Path) -> None:
    """Sync the list of files in `folder`. Only then does a new file survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
