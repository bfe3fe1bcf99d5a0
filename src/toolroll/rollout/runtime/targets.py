"""`load_target`: loads the object `path/to/file.py:NAME` or `package.module:NAME`.

Invariants: a file is executed once per process, under a module name that is derived from its path.
An error in the file is reported on one line, with the file and its line number.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from toolroll.rollout.errors import UsageError, message_of
from toolroll.rollout.runtime.complaints import did_you_mean


def is_target(name: str) -> bool:
    """Return True if `name` is `FILE.py:NAME` or `MODULE:NAME`, not the name of an entry point."""
    return ":" in name or name.endswith(".py")


def absolute_target(name: str) -> str:
    """Return `name`. If it names a file, make its path absolute, because another process may have a
    different working directory.
    """
    source, colon, name_in_file = name.rpartition(":")
    return f"{Path(source).absolute()}{colon}{name_in_file}" if source.endswith(".py") else name


def load_target(target: str) -> tuple[Any, str]:
    """Return the object that `target` names, and a short name for it: `FILE:NAME` without folders.

    The file's folder is appended to `sys.path`, so that the file can import its neighbors. For a
    module, the working directory is appended. Raise `UsageError` if there is no such file, module
    or name, or if executing the file raises an error.
    """
    source, colon, name = target.rpartition(":")
    if not colon or not source or not name:
        file = source or ("FILE.py" if colon else target)
        raise UsageError(f"{target}: name the object in the file: {file}:NAME")
    if source.endswith(".py"):
        module, short = _load_file(Path(source)), Path(source).stem
    else:
        module, short = _load_module(source), source.rpartition(".")[2]
    if name not in vars(module):
        names = [
            public
            for public, value in vars(module).items()
            if not public.startswith("_") and _is_own(value, module)
        ]
        there = f"; it has {', '.join(names[:20])}" if names else "; it is empty"
        raise UsageError(f"{source} has no {name!r}{did_you_mean(name, names, there)}")
    return vars(module)[name], f"{short}:{name}"


def _is_own(value: Any, module: ModuleType) -> bool:
    """Return False if `module` only imports `value`."""
    imported = isinstance(value, type) or inspect.isroutine(value)
    home = getattr(value, "__module__", None)
    return not (inspect.ismodule(value) or (imported and home != module.__name__))


def error_line(error: BaseException, path: Path | None = None) -> str:
    """Return one line of text: a file, a line number, and the error.

    The file and the line number are those of the innermost frame of the traceback that is in the
    file `path`. If no frame is in `path`, they are those of the innermost frame.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    frame_in_file = next((f for f in reversed(frames) if path and Path(f.filename) == path), None)
    frame = frame_in_file or frames[-1]
    location = f"{frame.filename}, line {frame.lineno}"
    if path is not None and frame.filename.startswith("<frozen importlib"):
        location = str(path)  # Python refused the file before it ran a line of it
    text = " ".join(message_of(error).split())
    return f"{location}: {type(error).__name__}: {text}"


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path} (looked for in {Path.cwd()})")
    path = path.resolve()
    digest = hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()
    name = f"toolroll_env_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    _append_to_path(path.parent)
    sys.modules[name] = module  # dataclasses and pydantic look up their own module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UsageError(error_line(error, path)) from error
    return module


def _load_module(name: str) -> ModuleType:
    _append_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise UsageError(
                f"there is no module {missing!r} (looked for in the installed packages and in "
                f"{Path.cwd()}; a file is named as path/to/file.py:NAME)"
            ) from error
        raise UsageError(error_line(error, _file_of(name))) from error


def _file_of(module: str) -> Path | None:
    """Return the file of a module whose import failed, or None if it is unknown."""
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit):  # noqa: BLE001 - importing a package may raise anything
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _append_to_path(folder: Path) -> None:
    """Append `folder` to `sys.path`, so that its files do not hide installed packages."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
