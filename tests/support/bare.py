"""A part of a trainer's package without the rest of it, which imports engines and CUDA."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.inventory import Tree, bindings
from support.stubs.absent import Absent


def bare(*names: str) -> None:
    """Make packages importable without their `__init__`, which draws engines and CUDA. To be called
    in a process of its own, or in `borrowed`.
    """
    for name in names:
        found = find_spec(name.partition(".")[0])
        assert found is not None and found.submodule_search_locations
        folder = Path(found.submodule_search_locations[0]).parent
        module = ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__spec__.submodule_search_locations = module.__path__
        if "__version__" in Tree().bound(name):
            vars(module)["__version__"] = version(name)
        sys.modules[name] = module


def absent(names: str) -> None:
    """Make modules importable that are not installed, and that the code which is called does not
    use. To be called in a process of its own.
    """
    sys.meta_path.insert(0, Absent(names.split()))


@contextmanager
def borrowed(names: str, *, without: str = "") -> Iterator[None]:
    """`bare` for the packages in `names`, in this process, until the end of the block. `without`
    names modules that are not installed, and that the code which is called does not use.
    """
    before, absent = dict(sys.modules), Absent(without.split())
    tops = {name.partition(".")[0] for name in (*names.split(), *without.split())}

    def forget() -> None:
        for name in [one for one in sys.modules if one.partition(".")[0] in tops]:
            del sys.modules[name]

    forget()
    sys.meta_path.insert(0, absent)
    bare(*names.split())
    try:
        yield
    finally:
        sys.meta_path.remove(absent)
        forget()
        sys.modules.update(before)


def run_apart(code: str) -> None:
    """Run `code` in a process of its own, with this one's search path."""
    paths = f"import sys; sys.path[:] = {sys.path!r}\nfrom support.bare import absent, bare\n"
    subprocess.run([sys.executable, "-c", paths + code], check=True)


# --- functions and classes out of a file, without their module ------------------------------------


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
