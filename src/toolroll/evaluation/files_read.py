"""`FilesRead`: the files that an environment's code opens, which its text need not name."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import source_from_cache
from pathlib import Path
from weakref import WeakSet

from toolroll.evaluation.environment_identity import content_hash

MOST = 1000
"""The maximum number of files that are recorded."""
_LIBRARY = str(Path(__file__).parents[1])
_APART = (
    *(f"{folder}{os.sep}" for folder in (sys.prefix, sys.base_prefix, _LIBRARY)),
    *("/dev/", "/etc/", "/proc/", "/sys/", "/usr/"),
)
"""Packages, whose versions are recorded, and the machine's own files."""
_LISTS = ("os.listdir", "os.scandir")
_EVENTS = ("open", "sqlite3.connect", *_LISTS)
_WRITES = os.O_WRONLY | os.O_RDWR
_RECORDERS: WeakSet[FilesRead] = WeakSet()  # of this process, as its hook is


class FilesRead:
    """Records, as long as it exists, which files are opened for reading and which folders are
    listed by the code in the folder of the environment `target` and below, or by what it calls.

    Only environments in a file (`FILE.py:NAME`) have such a folder. Files that are newer than the
    recorder, or that other processes read, are not recorded.
    """

    def __init__(self, target: str) -> None:
        module = target.rpartition(":")[0]
        file = Path(module).absolute() if module.endswith(".py") else None
        self._folders = () if file is None else (file.parent, file.resolve().parent)
        self._code = tuple(f"{folder}{os.sep}" for folder in self._folders)
        self._began = time.time()
        self._opened: dict[str, None] = {}
        self._hashed = 0
        self._hashes: dict[str, str] = {}
        if self._code:
            _listen()
            _RECORDERS.add(self)

    def saw(self, path: str, *, listed: bool) -> None:
        """Record the file `path`, which is being opened, or the folder, which is being listed, if
        the environment's code does it. Its own folder and those above hold other things too.
        """
        path = os.path.abspath(path)  # noqa: PTH100 - a link keeps its name
        if path in self._opened or len(self._opened) >= MOST or path.startswith(_APART):
            return
        if listed and any(folder.is_relative_to(path) for folder in (*self._folders, Path.cwd())):
            return
        frame = sys._getframe()
        while frame := frame.f_back:  # type: ignore[assignment]
            name = frame.f_code.co_filename
            if name.startswith(self._code) and not name.startswith(_APART):
                self._opened[path] = None
                return

    def hashes(self) -> Mapping[str, str]:
        """Return a hash of each file by its name, which is relative to the environment's folder if
        it is below it.
        """
        new = list(self._opened)[self._hashed :]
        self._hashed += len(new)
        for path in map(Path, new):
            with suppress(OSError):
                if path.stat().st_mtime < self._began:
                    inside = [folder for folder in self._folders if path.is_relative_to(folder)]
                    name = path.relative_to(inside[0]).as_posix() if inside else str(path)
                    self._hashes[name] = content_hash(path)
        return self._hashes

    def again(self, recorded: Mapping[str, str]) -> dict[str, str]:
        """Return what the files that an earlier run `recorded` are now."""
        folder = self._folders[0] if self._folders else Path()
        return {name: content_hash(folder / name) for name in recorded}


@cache  # an audit hook cannot be removed
def _listen() -> None:
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if not _RECORDERS or event not in _EVENTS:
        return
    path, flags = arguments[0], arguments[2] if event == "open" else 0
    if isinstance(path, int) or (isinstance(flags, int) and flags & _WRITES):
        return
    if event in _LISTS and sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
        return  # it looks for a module
    try:
        name = os.fsdecode(path)  # type: ignore[arg-type]
        name = source_from_cache(name) if name.endswith(".pyc") else name
    except (TypeError, ValueError):
        return
    for recorder in list(_RECORDERS):
        recorder.saw(name, listed=event in _LISTS)
