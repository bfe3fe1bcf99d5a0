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
    return any(path == each or path.startswith(f"{each.rstrip('/')}/") for each in folders)


def visible_folders(folders: Sequence[str | Path]) -> list[str]:
    """Return the folders that a sandbox sees: `folders`, this interpreter, and those in `PATH`.

    Raise `UsageError` for one that holds what a sandbox may not see, or that its user cannot read.
    """
    named = sorted(str(Path(each).absolute()) for each in folders)
    program = Path(sys.executable).resolve().parents[1]
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    private = (*OWN, "/proc", "/dev", str(Path.home()))
    for each in named:
        if any(below(own, [each, os.path.realpath(each)]) for own in private):
            raise UsageError(f"a sandbox cannot see the folder {each}, which holds too much")
        if not Path(each).is_dir():
            raise UsageError(f"there is no folder {each} to show in a sandbox")
        if is_root() and Path(each).stat().st_mode & 5 != 5:
            raise UsageError(f"sandboxes of root have another user: let others read {each}")
    shown: list[str] = []
    found = [each for each in (sys.prefix, sys.base_prefix, str(program), *path) if each[:1] == "/"]
    for each in sorted({*named, *map(os.path.normpath, found)}):
        large = any(below(own, [each]) for own in private)
        if not large and not below(each, [*SYSTEM, *shown]) and os.access(each, os.X_OK):
            shown.append(each)
    return shown


def hidden_places(folders: Sequence[str], hidden: Sequence[str | Path]) -> list[str]:
    """Return the places in `folders` of the folders `hidden`, also through links."""
    places: list[str] = []
    for folder in folders:
        real = os.path.realpath(folder)
        for each in sorted(os.path.realpath(each) for each in hidden):
            place = folder + each.removeprefix(real)
            if below(each, [real]) and Path(each).is_dir() and not below(place, places):
                places.append(place)
    return places


def locked_folders() -> list[str]:
    """Return the folders that this process has locked: those of runs and of sessions."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            file = descriptor.readlink()
            if file.name == ".lock":
                found.append(str(file.parent))
    return found


def find(name: str, package: str = "util-linux") -> str:
    """Return the path of the program `name`, where programs in the sandbox cannot change it."""
    path = shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin")
    if path is None:
        raise UsageError(f"the local back end needs {name}: install the package {package}")
    return path
