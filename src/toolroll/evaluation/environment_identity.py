"""`environment_identity`: what an environment is, so that a run notices that it changed.

Invariants: comments, white space, the place of a file and the order of keys in its JSON change
nothing. Nothing is executed, and what cannot be parsed counts as its bytes. If the data are
very large, only names and sizes of the rest count, so that a run starts soon.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import orjson

from toolroll.rollout.environment import EnvironmentFactory, Task
from toolroll.rollout.runs.provenance import benchmark_packages, package_digest, package_version
from toolroll.rollout.runs.registry import environment_file
from toolroll.rollout.runs.runner import task_hash

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


def imported_packages(target: str) -> dict[str, str | None]:
    """Return the versions of the installed packages that the environment's file and the modules
    beside it import, without toolroll.
    """
    path = environment_file(target)
    trees = [] if path is None else [tree for _, _, tree in _files(path) if tree is not None]
    names = {name.partition(".")[0] for tree in trees for name in _absolute_imports(tree)}
    packages = {
        owner for name in names - sys.stdlib_module_names - {"toolroll"} for owner in _owners(name)
    }
    return {name: package_version(name) for name in sorted(packages)}


@cache
def _owners(module: str) -> Sequence[str]:
    """Return the installed packages that have `module`."""
    if package_version(module) is not None:
        return [module]
    return packages_distributions().get(module, [])  # slow: it reads the data of all packages


def content_hash(path: Path) -> str:
    """Return a hash of what the file `path` says: of Python, the syntax tree; of JSON, the values;
    of a very large file, its size; of a folder, the names in it that are not hidden. Return "none"
    if it cannot be read.
    """
    try:
        if path.is_dir():
            names = sorted(file.name for file in path.iterdir())
            return _digest([name for name in names if not name.startswith((".", "__pycache__"))])
        size = path.stat().st_size
        return f"{size} bytes" if size > _MOST_READ else _hash(path, path.read_bytes())
    except OSError:
        return "none"


def _contents(start: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and hashes of the environment's files. Names are relative to its folder."""
    for name, digest, _ in _files(start):
        yield name, digest


def _files(start: Path) -> Iterator[tuple[str, str, ast.Module | None]]:
    """Yield the name of each of the environment's files, its hash, and the tree of a module."""
    folder, seen, waiting, bytes_left = start.parent, set[Path](), [start], _MOST_READ
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        name = "" if path == start else path.relative_to(folder).as_posix()
        size = 0 if path.suffix == ".py" else path.stat().st_size
        bytes_left -= size
        if size and bytes_left < 0:
            yield name, f"{size} bytes", None
            continue
        content = path.read_bytes()
        tree = _parsed(content) if path.suffix == ".py" else None
        yield name, _hash(path, content), tree
        if tree is not None:
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
            stem = base.joinpath(*inside.split(".")) if inside else base
            for file in (stem.with_suffix(".py"), stem / "__init__.py"):
                if file.is_file() and file.resolve().is_relative_to(folder):
                    yield file.resolve()


def _package_names(folder: Path) -> list[str]:
    """Return the names of the packages that `folder` is in, from the outermost one."""
    names: list[str] = []
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def _absolute_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def _named(tree: ast.Module, folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` and below that a string of the module names."""
    for node in ast.walk(tree):
        name = node.value if isinstance(node, ast.Constant) else None
        if isinstance(name, str) and _FILE_NAME.fullmatch(name):
            file = (folder / name).resolve()
            if file.is_relative_to(folder) and file.is_file():
                yield file


def _hash(path: Path, content: bytes) -> str:
    if path.suffix == ".py" and (tree := _parsed(content)) is not None:
        return _sha256(ast.unparse(tree).encode())
    if path.suffix in (".json", ".jsonl"):
        with suppress(ValueError, TypeError):  # TypeError: too deep for `dumps`
            lines = content.splitlines() if path.suffix == ".jsonl" else [content]
            values = [orjson.loads(line) for line in lines if line.strip()]
            content = orjson.dumps(values, option=orjson.OPT_SORT_KEYS)
    return _sha256(content)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest(parts: Collection[object]) -> str:
    return _sha256(orjson.dumps(list(parts)))[:16]
