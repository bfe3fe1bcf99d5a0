"""A value that can be imported, subscripted and annotated with, but raises when it is used."""

from typing import Any


class Absent:
    """What a stub module gives for any name."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._path}.{name}")

    def __getitem__(self, key: Any) -> "Absent":
        return Absent(f"{self._path}[{key!r}]")

    def __hash__(self) -> int:
        return hash(self._path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Absent) and other._path == self._path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self._path} is a stub: torchvision's wheel does not load beside the CPU build of "
            f"torch"
        )


def absent(path: str, name: str) -> Absent:
    """The value of `path.name`, for a module's `__getattr__`."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"{path}.{name}")
