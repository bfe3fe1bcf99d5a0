"""What a sandbox sees of the machine: which folders, and which places in them are hidden."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from toolroll.rollout.errors import UsageError

OWN = ("/app", "/home", "/logs", "/solution", "/tests", "/tmp")
SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr")


def is_root() -> bool:
    """Return whether this process is root."""
    return os.geteuid() == 0


def below(path: str, folders: Sequence[str]) -> bool:
    """Return whether `path` is one of `folders`, or is in one."""
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def visible_folders(folders: Sequence[str | Path]) -> list[str]:
    """Return the folders that a sandbox sees: `folders`, this interpreter, and those in `PATH`.

    Raise `UsageError` for one that holds what a sandbox may not see, or that its user cannot read.
    """
    named = sorted(str(Path(name).absolute()) for name in folders)
    program = Path(sys.executable).resolve().parents[1]
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    private = (*OWN, "/proc", "/dev", str(Path.home()))
    for folder in named:
        if any(below(secret, [folder, os.path.realpath(folder)]) for secret in private):
            raise UsageError(f"a sandbox cannot see the folder {folder}, which holds too much")
        if not Path(folder).is_dir():
            raise UsageError(f"there is no folder {folder} to show in a sandbox")
        if is_root() and Path(folder).stat().st_mode & 5 != 5:
            raise UsageError(f"sandboxes of root have another user: let others read {folder}")
    shown: list[str] = []
    paths = [name for name in (sys.prefix, sys.base_prefix, str(program), *path) if name[:1] == "/"]
    for folder in sorted({*named, *map(os.path.normpath, paths)}):
        large = any(below(secret, [folder]) for secret in private)
        if not large and not below(folder, [*SYSTEM, *shown]) and os.access(folder, os.X_OK):
            shown.append(folder)
    return shown


def hidden_places(folders: Sequence[str], hidden: Sequence[str | Path]) -> list[str]:
    """Return the places in `folders` of the folders `hidden`, also through links."""
    places: list[str] = []
    for folder in folders:
        real = os.path.realpath(folder)
        for path in sorted(os.path.realpath(path) for path in hidden):
            place = folder + path.removeprefix(real)
            if below(path, [real]) and Path(path).is_dir() and not below(place, places):
                places.append(place)
    return places


def locked_folders() -> list[str]:
    """Return the folders that this process has locked: those of runs and of sessions."""
    locked = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            file = descriptor.readlink()
            if file.name == ".lock":
                locked.append(str(file.parent))
    return locked


def find(name: str, package: str = "util-linux") -> str:
    """Return the path of the program `name`, where programs in the sandbox cannot change it."""
    path = shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin")
    if path is None:
        raise UsageError(f"the local back end needs {name}: install the package {package}")
    return path
