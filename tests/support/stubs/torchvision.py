"""Replace torchvision, whose PyPI wheel does not load with the CPU build of torch (operator
torchvision::nms is missing).

SGLang imports it only for image models: every name exists, and raises when it is called.
"""

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.28.0"
__path__: list[str] = []


@dataclass(frozen=True)
class Absent:
    """A value that can be imported, subscripted and annotated with."""

    _path: str

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._path}.{name}")

    def __getitem__(self, key: Any) -> "Absent":
        return Absent(f"{self._path}[{key!r}]")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self._path} is a stub: torchvision does not load here")


__getattr__ = Absent(__name__).__getattr__

_TRANSFORMS = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")
for _name in ("io", *_TRANSFORMS):
    _module = ModuleType(f"{__name__}.{_name}")
    _module.__path__, _module.__spec__ = [], ModuleSpec(_module.__name__, None, is_package=True)
    vars(_module)["__getattr__"] = Absent(_module.__name__).__getattr__
    sys.modules[_module.__name__] = _module
