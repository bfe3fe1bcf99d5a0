"""Stand-ins for classes, functions and modules of other packages. None has anything that the
package lacks: each is compared with `inventory.json` where it is defined, and the inventory with
the package in tests/contract/test_standins.py.

`stands_for` marks a class or a function, `recorded_class` makes one of the inventory, `stand_in`
puts modules into `sys.modules`, and `named` makes objects of settings. The stand-ins that use none
of these are found by tests/unit/support/test_standins.py.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
from support.inventory import Entry, Function, entry_of, recorded

TESTS = Path(__file__).parents[1]
CONSTRUCTOR = "__init__"
Made = TypeVar("Made")


@dataclass(frozen=True)
class Claim:
    """`made` stands for `real` (`module:name`). `own`: members that only tests use, and parameters
    that the real one takes as `**kwargs`.
    """

    made: Any
    real: str
    own: str = ""

    def check(self) -> None:
        """Raise AssertionError if `made` has or takes something that `real` does not."""
        found = faults(self.real, described(self.made), inventory_entry(self.real), self.own)
        assert not found, "\n".join(found)


CLAIMS: dict[int, Claim] = {}
"""The marked classes and functions, by identity."""


def stands_for(real: str, *, own: str = "") -> Callable[[Made], Made]:
    """Mark a class or function as a stand-in (see Claim). One that says too much is an error."""

    def marked(made: Made) -> Made:
        CLAIMS[id(made)] = claim = Claim(made, real, own)
        claim.check()
        return made

    return marked


def stand_in(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Make `modules` importable, whether or not their package is installed."""
    for name, contents in modules.items():
        module = ModuleType(name)
        assert contents or any(it.startswith(name) for it in modules if it != name), name
        for attribute, made in contents.items():
            real = f"{name}:{attribute}"
            claim = CLAIMS.get(id(made), Claim(made, real))
            dataclasses.replace(claim, real=real).check()
            setattr(module, attribute, made)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(sys.modules[parent], child, module)


def named(real: str, **values: Any) -> SimpleNamespace:
    """`values` as an object with attributes, all of which the class `real` has."""
    unknown = values.keys() - members(inventory_entry(real))
    assert not unknown, f"{real} has no {sorted(unknown)}"
    return SimpleNamespace(**values)


RECORDED: dict[type, Entry] = {}
"""The entries of the classes that `recorded_class` made."""


def recorded_class(real: str, names: str = "", **factories: Callable[[], Any]) -> Any:
    """A dataclass with the recorded fields of `real` and their defaults: those in `names`, or all.
    `factories` make the defaults that the inventory has no literal for.
    """
    entry = inventory_entry(real)
    fields = {name: entry["fields"][name] for name in names.split() or entry["fields"]}
    module = sys._getframe(1).f_globals["__name__"]  # as `collections.namedtuple`, for pickle
    made = _class_of(real.rpartition(":")[2], module, {**entry, "fields": fields}, factories)
    RECORDED[made] = {"fields": fields, "methods": {}, "attributes": {}, "classes": {}}
    return stands_for(real)(made)


def _class_of(name: str, module: str, entry: Entry, factories: Mapping[str, Any]) -> Any:
    """The class of an entry, with the classes in it. One without fields is an enumeration."""
    if not entry["fields"]:
        values = {key: ast.literal_eval(value) for key, value in entry["attributes"].items()}
        enumeration: Any = Enum
        return enumeration(name.rpartition(".")[2], values, module=module, qualname=name)
    inner = {
        each: _class_of(f"{name}.{each}", module, part, {})
        for each, part in entry["classes"].items()
    }
    fields = [
        (each, Any, _field(value, {**inner, **factories}, factories.get(each)))
        for each, value in entry["fields"].items()
    ]
    needed = [not value for value in entry["fields"].values()]
    ordered = needed == sorted(needed, reverse=True)
    made = make_dataclass(name.rpartition(".")[2], fields, namespace=inner, kw_only=not ordered)
    made.__module__, made.__qualname__ = module, name
    return made


def _field(value: str, known: Mapping[str, Any], factory: Any) -> Any:
    """A field whose default is recorded as `value`: a literal, a name in `known`, or none."""
    called = re.search(r"default_factory=(\w+)", value)
    if called and called[1] in known:
        factory = known[called[1]]
    if factory is not None:
        return field(default_factory=factory)
    kind, _, member = value.partition(".")
    if kind in known:
        return field(default=known[kind][member])
    if not value:
        return field()
    default = ast.literal_eval(_plain(value))
    mutable = isinstance(default, dict | list)
    return field(default_factory=type(default)) if mutable else field(default=default)


def inventory_entry(real: str) -> Entry:
    """The recorded entry of `module:name`."""
    package = recorded().get(real.partition(".")[0].partition(":")[0], {"names": {}})
    assert real in package["names"], f"{real} is not recorded: see support/inventory.py"
    entry: Entry = package["names"][real]
    return entry


def described(made: Any) -> Entry:
    """The entry of a stand-in. Of a class: with those of its base classes that tests define."""
    if isinstance(made, type):
        assert not issubclass(made, SimpleNamespace | Mock), f"{made} takes every name"
        entry: Entry = {"fields": {}, "methods": {}, "attributes": {}, "classes": {}}
        for kind in reversed(made.__mro__):
            if TESTS in Path(getattr(sys.modules[kind.__module__], "__file__", None) or "").parents:
                own = RECORDED.get(kind) or entry_of(_node(kind))
                entry = {part: {**entry[part], **own[part]} for part in entry}
        return entry
    return entry_of(_node(made)) if inspect.isfunction(made) else {"value": repr(made)}


@cache
def _node(made: Any) -> ast.AST:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(made))).body
    written = isinstance(node, ast.ClassDef | Function)
    assert written, f"write the stand-in {made} as a class or a function"
    return node


def members(entry: Entry) -> set[str]:
    """The names that the objects of a class have."""
    return {name for part in ("fields", "methods", "attributes", "classes") for name in entry[part]}


def faults(name: str, ours: Entry, theirs: Entry, own: str = "") -> list[str]:
    """What the entry `ours` has or takes, and `theirs` does not (`own`: see Claim)."""
    known = set(own.split())
    if ours.keys() != theirs.keys():
        return [f"{name}: {sorted(theirs)} in the package, here {sorted(ours)}"]
    if "function" in ours:
        return list(_parameters(name, ours["function"], theirs["function"], known))
    if "value" in ours:
        return list(_differ(name, ours["value"], theirs["value"]))
    return list(_class(name, ours, theirs, known)) if "methods" in ours else []


def _class(name: str, ours: Entry, theirs: Entry, own: set[str]) -> Iterator[str]:
    known = members(theirs)
    for member in members(ours) - own - {CONSTRUCTOR}:
        where = f"{name}.{member}"
        if member not in known:
            yield f"{where}: the package has no such member"
        elif (member in ours["methods"]) != (member in theirs["methods"]):
            yield f"{where}: a method in one, and none in the other"
        elif member in ours["methods"]:
            made, real = ours["methods"][member], theirs["methods"][member]
            yield from _parameters(where, made, real, own)
        elif member in ours["classes"]:
            yield from faults(where, ours["classes"][member], theirs["classes"][member])
        else:
            for part in ("fields", "attributes"):
                if member in ours[part] and member in theirs[part]:
                    yield from _differ(where, ours[part][member], theirs[part][member])
    made, real = _constructor(ours), _constructor(theirs)
    if CONSTRUCTOR not in own and made and real:
        yield from _parameters(name, made, real, own)


def _constructor(entry: Entry) -> str:
    """The signature of a class, which its fields make if it has no method for it."""
    if CONSTRUCTOR in entry["methods"]:
        return str(entry["methods"][CONSTRUCTOR]).removeprefix("async ")
    fields = [f"{name}={value}" if value else name for name, value in entry["fields"].items()]
    return f"(*, {', '.join(fields)})" if fields else ""


def _parameters(name: str, ours: str, theirs: str, own: set[str]) -> Iterator[str]:
    made, real = _Signature(ours), _Signature(theirs)
    if not real.defaults and len(real.starred) == 2:
        return  # it passes all on
    if made.coroutine != real.coroutine:
        yield f"{name}: async in one, and not in the other"
    if made.starred - real.starred:
        yield f"{name}: the package takes no {sorted(made.starred - real.starred)}"
    for one, default in made.defaults.items():
        where = f"{name}({one})"
        if one not in real.defaults:
            if one in made.positions or one not in own or "**" not in real.starred:
                yield f"{where}: the package has no such parameter"
            continue
        if one in made.positions and made.positions[one] != real.positions.get(one):
            yield f"{where}: not at the package's position"
        if default is not None and real.defaults[one] is None:
            yield f"{where}: the package has no default"
        yield from _differ(where, default or "", real.defaults[one] or "")
    needed = {one for one, default in real.defaults.items() if default is None}
    if missing := needed - made.defaults.keys():
        yield f"{name}: the package needs {sorted(missing)}"


class _Signature:
    """The parameters of a text such as `async (ids, *, seed=None)`."""

    def __init__(self, text: str) -> None:
        self.coroutine = text.startswith("async ")
        (node,) = ast.parse(f"def f{text.removeprefix('async ')}: pass").body
        assert isinstance(node, ast.FunctionDef)
        arguments = node.args
        listed = [*arguments.posonlyargs, *arguments.args]
        values = [None] * (len(listed) - len(arguments.defaults)) + arguments.defaults
        pairs = [*zip(listed, values, strict=True)]
        pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        self.positions = {one.arg: at for at, one in enumerate(listed)}
        self.defaults = {one.arg: ast.unparse(value) if value else None for one, value in pairs}
        stars = {"*": arguments.vararg, "**": arguments.kwarg}
        self.starred = {star for star, one in stars.items() if one is not None}


def _differ(where: str, ours: str, theirs: str) -> Iterator[str]:
    """Two values that are literals and not equal."""
    try:
        made, real = (ast.literal_eval(_plain(value)) for value in (ours, theirs))
    except (ValueError, SyntaxError):
        return
    if made != real:
        yield f"{where}: {real!r} in the package, here {made!r}"


def _plain(value: str) -> str:
    """The literal that a field's default is."""
    for factory, literal in {"dict": "{}", "list": "[]"}.items():
        if f"default_factory={factory})" in value.replace(",", ")"):
            return literal
    return value
