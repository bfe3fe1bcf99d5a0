"""Packages that are not installed, as modules in which every name is a class: for imports,
annotations, base classes and decorators.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any


class _Name(type):
    """A name of an absent module. A call with a function alone returns it, as a decorator does. Any
    other call raises, or returns a decorator if `_decorates`.
    """

    _decorates = False

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and not named and callable(given[0]):
            return given[0]
        if cls._decorates:
            return lambda function: function
        raise RuntimeError(f"{cls.__name__} is not installed: the test cannot use it")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _named(f"{cls.__name__}.{name}", decorates=cls._decorates))
        return vars(cls)[name]

    def __getitem__(cls, key: Any) -> Any:
        return cls


def _named(name: str, *, decorates: bool) -> _Name:
    return _Name(name, (Exception,), {"_decorates": decorates})


class Absent(MetaPathFinder, Loader):
    """Finds the modules `names` and all below them."""

    def __init__(self, names: Sequence[str], *, decorates: bool = False) -> None:
        self._names, self._decorates = names, decorates

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        below = any(fullname == one or fullname.startswith(f"{one}.") for one in self._names)
        return ModuleSpec(fullname, self, is_package=True) if below else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module, names = ModuleType(spec.name), _named(spec.name, decorates=self._decorates)
        module.__getattr__ = lambda name: getattr(names, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def replace(name: str, version: str, *, decorates: bool = False) -> None:
    """Put an absent package in the place of the module `name`, which calls this."""
    finder = Absent([name], decorates=decorates)
    sys.meta_path.insert(0, finder)
    module = module_from_spec(ModuleSpec(name, finder, is_package=True))
    vars(module)["__version__"] = version
    sys.modules[name] = module
