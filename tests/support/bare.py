"""Importing a part of a trainer's package without the rest of it."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from support.inventory import Tree


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


class _Unused(type):
    """A name of an absent module, for annotations and base classes. Calls raise, or decorate."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and not named and callable(given[0]):
            return given[0]
        raise RuntimeError(f"{cls.__name__} is not installed: the test cannot use it")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused(f"{cls.__name__}.{name}", (Exception,), {})

    def __getitem__(cls, key: Any) -> Any:
        return cls


class _Absent(MetaPathFinder, Loader):
    """Modules whose names are imported and not used, and all modules below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        below = any(fullname == one or fullname.startswith(f"{one}.") for one in self._names)
        return ModuleSpec(fullname, self, is_package=True) if below else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        names = _Unused(spec.name, (Exception,), {})
        module.__getattr__ = lambda name: getattr(names, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def absent(names: str) -> None:
    """Make modules importable that are not installed, and that the code which is called does not
    use. To be called in a process of its own.
    """
    sys.meta_path.insert(0, _Absent(names.split()))


@contextmanager
def borrowed(names: str, *, without: str = "") -> Iterator[None]:
    """`bare` for the packages in `names`, in this process, until the end of the block. `without`
    names modules that are not installed, and that the code which is called does not use.
    """
    before, absent = dict(sys.modules), _Absent(without.split())
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
