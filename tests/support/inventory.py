"""What the packages of others have: names, kinds, parameters and fields, read from their source.

`inventory.json` has the names that stand-ins in the tests take the place of. The command records
them again; with names (`module:name`), it adds these. `FOLDER` is a checkout; without it, the
installed package is read. No module of the package is imported.

    PYTHONPATH=tests python -m support.inventory PACKAGE [--root FOLDER] [--origin TEXT] [NAME ...]
"""

import argparse
import ast
import copy
import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

INVENTORY = Path(__file__).with_suffix(".json")
NOT_READ = {"pydantic", "torch", "typing_extensions", *sys.stdlib_module_names}
"""Base classes of these packages add nothing to an entry."""
Entry = dict[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Missing(LookupError):
    """The package has no such module or name."""


class Tree:
    """A package's source. `root`: the folder that has the package; None: where it is installed."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root

    def entry(self, name: str) -> Entry:
        """The entry of `module:name`. Raises Missing."""
        module, _, attribute = name.partition(":")
        where, node = self._find(module, attribute)
        return self._entry(where, node)

    def bound(self, module: str) -> set[str]:
        """The names that a module binds at its top level."""
        return {name for name, _ in bindings(self._body(module))}

    def _file(self, module: str) -> Path:
        top, *parts = module.split(".")
        roots = [self._root / top] if self._root else _installed(top)
        for root in roots:
            for file in (root.joinpath(*parts, "__init__.py"), root.joinpath(*parts)):
                if file.suffix == ".py" and file.is_file():
                    return file
                if file.with_name(f"{file.name}.py").is_file() and parts:
                    return file.with_name(f"{file.name}.py")
        raise Missing(f"there is no module {module}")

    def _body(self, module: str) -> list[ast.stmt]:
        return _parsed(self._file(module)).body

    def _find(self, module: str, name: str) -> tuple[str, ast.AST]:
        """Where `module.name` is defined, through imports, and its definition."""
        stars = []
        for bound, node in reversed(list(bindings(self._body(module)))):
            if isinstance(node, ast.ImportFrom):
                source = self._source(module, node)
                if bound == "*":
                    stars.append(source)
                elif bound == name:
                    (alias,) = [one for one in node.names if (one.asname or one.name) == name]
                    return self._imported(source, alias.name)
            elif bound == name and not isinstance(node, ast.Import):
                return self._aliased(module, node)
        for source in stars:
            try:
                return self._find(source, name)
            except Missing:
                continue
        raise Missing(f"the module {module} has no {name}")

    def _aliased(self, module: str, node: ast.AST) -> tuple[str, ast.AST]:
        """What `node` gives another name to, as in `init = sdk.init`; or `node`."""
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Name):
            return self._find(module, value.id)
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            where, found = self._find(module, value.value.id)
            if isinstance(found, ast.Module):
                return self._find(where, value.attr)
        return module, node

    def _imported(self, source: str, name: str) -> tuple[str, ast.AST]:
        try:
            return self._find(source, name)
        except Missing:
            return f"{source}.{name}", _parsed(self._file(f"{source}.{name}"))

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        """The module that `node` of `module` imports from."""
        if not node.level:
            return node.module or ""
        package = module.split(".")
        drop = node.level - (self._file(module).name == "__init__.py")
        parts = package[: len(package) - drop]
        return ".".join([*parts, node.module] if node.module else parts)

    def _entry(self, module: str, node: ast.AST) -> Entry:
        if not isinstance(node, ast.ClassDef):
            return entry_of(node)
        entry = entry_of(node)
        for base in node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            try:
                where, found = self._find(module, name)
                if where.partition(".")[0] in NOT_READ or found is node:
                    continue
                inherited = self._entry(where, found)
            except Missing:
                continue
            for part in ("fields", "methods", "attributes", "classes"):
                entry[part] = {**inherited.get(part, {}), **entry[part]}
        return entry


def entry_of(node: ast.AST) -> Entry:
    """The kind, parameters and fields of a definition, without its base classes."""
    if isinstance(node, Function):
        return {"function": signature(node)}
    if isinstance(node, ast.ClassDef):
        return _class(node)
    if isinstance(node, ast.Module):
        return {"module": True}
    return {"value": ast.unparse(node.value)} if getattr(node, "value", None) else {"value": ""}  # type: ignore[attr-defined]


def signature(node: Function, *, bound: bool = False) -> str:
    """The bare parameters, such as `async (ids, *, seed=None)`. `bound`: without the first."""
    arguments = copy.deepcopy(node.args)  # parsed files are kept
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        one.annotation = None
    for star in (arguments.vararg, arguments.kwarg):
        if star is not None:
            star.annotation = None
    if bound and (listed := arguments.posonlyargs or arguments.args):
        del listed[0]
    return f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}({ast.unparse(arguments)})"


def _class(node: ast.ClassDef) -> Entry:
    fields: dict[str, str] = {}
    attributes: dict[str, str] = {}
    methods: dict[str, str] = {}
    classes: dict[str, Entry] = {}
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            part = attributes if "ClassVar" in ast.unparse(one.annotation) else fields
            part[one.target.id] = ast.unparse(one.value) if one.value else ""
        elif isinstance(one, ast.Assign):
            for target in one.targets:
                if isinstance(target, ast.Name):
                    attributes[target.id] = ast.unparse(one.value)
        elif isinstance(one, ast.ClassDef):
            classes[one.name] = _class(one)
        elif isinstance(one, Function):
            marks = {ast.unparse(mark).rpartition(".")[2] for mark in one.decorator_list}
            if marks & {"property", "cached_property"}:
                attributes[one.name] = ""
            elif not marks & {"setter", "overload"}:
                attributes |= dict.fromkeys(_set_on_self(one), "")
                methods[one.name] = signature(one, bound="staticmethod" not in marks)
    parts: Entry = {
        "fields": fields,
        "methods": methods,
        "attributes": attributes,
        "classes": classes,
    }
    return {
        name: {k: _short(v) for k, v in part.items() if not k.startswith("_") or k == "__init__"}
        for name, part in parts.items()
    }


def _short(value: Any) -> Any:
    return "<long>" if isinstance(value, str) and len(value) > 200 and value[-1] != ")" else value


def _set_on_self(function: Function) -> list[str]:
    return [
        one.attr
        for one in ast.walk(function)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    ]


def bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Each name that these statements bind, also below `if` and `try`."""
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name
                yield alias.asname or name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names = [one for one in ast.walk(target) if isinstance(one, ast.Name)]
                yield from ((one.id, node) for one in names if isinstance(one.ctx, ast.Store))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from bindings(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from bindings(handler.body)


def _installed(top: str) -> list[Path]:
    spec = find_spec(top)
    if spec is None:
        raise Missing(f"there is no package {top}")
    return [Path(place) for place in spec.submodule_search_locations or ()]


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def recorded() -> dict[str, Any]:
    """The recorded inventory: by package, where it is from and the entries of its names."""
    found: dict[str, Any] = json.loads(INVENTORY.read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--origin", help="the version or commit; not needed if it is installed")
    given = parser.parse_intermixed_args()
    inventory = recorded() if INVENTORY.is_file() else {}
    before = inventory.get(given.package, {"names": {}})
    tree = Tree(given.root)
    names = {*before["names"], *given.names}
    inventory[given.package] = {
        "origin": given.origin or before.get("origin") or version(given.package),
        "names": {name: tree.entry(name) for name in sorted(names)},
    }
    text = json.dumps(dict(sorted(inventory.items())), indent=1)
    INVENTORY.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
