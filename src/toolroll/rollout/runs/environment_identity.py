"""`environment_identity`: what an environment is, so that a run notices that it changed.

Invariants: comments, white space, the place of a file and the order of keys in its JSON change
nothing. Nothing is executed, and what cannot be parsed counts as its bytes. If the data are
very large, only names and sizes of the rest count, so that a run starts soon.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import orjson

from toolroll.rollout.runs.provenance import benchmark_packages, package_digest
from toolroll.rollout.runs.registry import environment_file
from toolroll.rollout.runs.runner import task_hash
from toolroll.rollout.types import EnvironmentFactory, Task

_MOST_READ = 256_000_000
_FILE_NAME = re.compile(r"\w[\w.-]{0,99}(/\w[\w.-]{0,99}){0,9}")


def environment_identity(
    target: str, factory: EnvironmentFactory, tasks: Sequence[Task]
) -> dict[str, str]:
    """Return hashes by what they cover: `code` (the environment's file, the modules beside it that
    it imports, and the files beside it that it names), `tasks` (the data of all tasks), and the
    packages that the environment needs, each as a version and a hash.

    `target`: the environment, as `find_environment` takes it.
    """
    path = environment_file(target)
    identity = {"tasks": _digest([task_hash(factory.name, task) for task in tasks])}
    if path is not None:
        identity["code"] = _digest(sorted(_contents(path)))
    for name, version in benchmark_packages(factory).items():
        identity[name] = f"{version} {package_digest(name)}".strip()
    return identity


def identity_hash(identity: Mapping[str, str] | None) -> str:
    """Return one hash of `identity`, or "" if there is none."""
    return _digest(sorted(identity.items())) if identity else ""


def _contents(start: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and hashes of the environment's files. Names are relative to its folder."""
    folder, seen, waiting, left = start.parent, set[Path](), [start], _MOST_READ
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        name = "" if path == start else path.relative_to(folder).as_posix()
        size = 0 if path.suffix == ".py" else path.stat().st_size
        left -= size
        if size and left < 0:
            yield name, f"{size} bytes"
            continue
        content = path.read_bytes()
        tree = _parsed(content) if path.suffix == ".py" else None
        if tree is None:
            yield name, _digest_of_data(path.suffix, content)
            continue
        yield name, _sha256(ast.unparse(tree).encode())
        waiting += _imported(tree, path, folder)
        waiting += _named(tree, path.parent)


def _parsed(content: bytes) -> ast.Module | None:
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _imported(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` and below that the module `path` imports."""
    package = ".".join(_package_names(folder))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            base, names = folder, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            base = path.parents[node.level - 1] if node.level else folder
            names = [module, *(f"{module}.{alias.name}".strip(".") for alias in node.names)]
        else:
            continue
        for name in names:
            inside = name.removeprefix(f"{package}.") if package and base == folder else name
            place = base.joinpath(*inside.split(".")) if inside else base
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file() and file.resolve().is_relative_to(folder):
                    yield file.resolve()


def _package_names(folder: Path) -> list[str]:
    """Return the names of the packages that `folder` is in, from the outermost one."""
    names: list[str] = []
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def _named(tree: ast.Module, folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` and below that a string of the module names, and all files of the
    folders there that one names.
    """
    for node in ast.walk(tree):
        name = node.value if isinstance(node, ast.Constant) else None
        if not isinstance(name, str) or _FILE_NAME.fullmatch(name) is None:
            continue
        place = (folder / name).resolve()
        if not place.is_relative_to(folder) or place == folder:
            continue
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                yield file


def _digest_of_data(suffix: str, content: bytes) -> str:
    if suffix == ".json":
        with suppress(orjson.JSONDecodeError):
            content = orjson.dumps(orjson.loads(content), option=orjson.OPT_SORT_KEYS)
    return _sha256(content)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest(parts: Collection[object]) -> str:
    return _sha256(orjson.dumps(list(parts)))[:16]
