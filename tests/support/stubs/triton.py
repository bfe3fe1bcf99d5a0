"""Replace triton's wheel of 1 GB: decorators do nothing, everything else is an empty module or
class.

SGLang imports triton for kernels that need a GPU; on the CPU none of them runs.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Class:
    """The base of every class here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _decorated(args, kwargs)


class _Module(ModuleType):
    """A package with every name: capitals begin classes, anything else modules that decorate."""

    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = sys.modules.get(full) or (
            type(name, (_Class,), {}) if name[0].isupper() else _Module(full)
        )
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _decorated(args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self


class _Finder(MetaPathFinder, Loader):
    """Finds every `triton.*`."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        below = fullname.startswith("triton.")
        return ModuleSpec(fullname, self, is_package=True) if below else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _decorated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `@triton.jit` and `@triton.jit(...)` leave: the function as it is."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0]
    return lambda function: function


sys.meta_path.insert(0, _Finder())
sys.modules[__name__] = _Module(__name__)
