"""Functions and classes out of a trainer's source, without their modules, which import engines and
CUDA.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.inventory import bindings


def theirs(file: str, *names: str, **given: Any) -> Any:
    """Return the objects `names` of the module in `file`, such as `areal/utils/data.py`: functions,
    classes, and methods as `Class.method`. `given` are the other names that their code uses, which
    the module has too, or which are the package's own.
    """
    package, tree = file.partition("/")[0], _tree(file)
    nodes = [_found(tree.body, name.split(".")) for name in names]
    used = {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}
    foreign = used & given.keys() - {name for name, _ in bindings(tree.body)}
    foreign = {name for name in foreign if not _is_of(package, given[name])}
    assert not foreign, f"{file} has no names {sorted(foreign)}"
    for node in nodes:
        node.decorator_list = []
    future: list[ast.stmt] = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *nodes], []), file, "exec"), given)
    found = [given[name.rpartition(".")[2]] for name in names]
    return found[0] if len(found) == 1 else found


def definition(file: str, name: str) -> Any:
    """Return the syntax tree of a function, a class or a `Class.method` in `file`."""
    return _found(_tree(file).body, name.split("."))


def _tree(file: str) -> ast.Module:
    package, _, path = file.partition("/")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed")
    return ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text())


def _is_of(package: str, made: Any) -> bool:
    return str(getattr(made, "__module__", "")).partition(".")[0] == package


def _found(body: list[ast.stmt], path: list[str]) -> Any:
    (node,) = [
        node
        for node in body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == path[0]
    ]
    return _found(node.body, path[1:]) if len(path) > 1 else node
