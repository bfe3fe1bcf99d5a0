"""Count the work of the parsers on a text, and that of an encoder, independent of the load of the
machine.

Work is the number of executed lines of the parsers, and of characters that their calls into C look
at or copy: methods of the text, slices of it, and searches with a pattern.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from toolroll.rollout.template.encode import Encoder

_FOLDERS = ("/toolroll/parsers/", "/tests/unit/parsers/")


class Work:
    """The work counted so far."""

    def __init__(self) -> None:
        self.lines = 0
        self.characters = 0

    @property
    def total(self) -> int:
        return self.lines + self.characters

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count lines and searches in the modules of `toolroll.parsers` and in the tests of it."""
        before = sys.gettrace()
        with pytest.MonkeyPatch.context() as patch:
            self._count_searches(patch)
            sys.settrace(self._on_call)
            try:
                yield
            finally:
                sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        counted = any(folder in frame.f_code.co_filename for folder in _FOLDERS)
        return self._on_line if counted else None

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        self.lines += 1
        return self._on_line

    def _count_searches(self, patch: pytest.MonkeyPatch) -> None:
        """Replace each pattern that a module or class of the parsers holds with a counting one."""
        from toolroll.parsers.reading import source

        compiled = source._compiled
        patch.setattr(
            source,
            "_compiled",
            lambda markers: (CountedPattern(compiled(markers)[0], self), *compiled(markers)[1:]),
        )
        modules = [module for name, module in sys.modules.items() if ".parsers." in name]
        classes = {
            id(it): it for module in modules for it in vars(module).values() if isinstance(it, type)
        }
        for holder in (*modules, *classes.values()):
            for name, value in list(vars(holder).items()):
                if isinstance(value, re.Pattern):
                    patch.setattr(holder, name, CountedPattern(value, self))
                elif isinstance(value, dict) and any(
                    isinstance(it, re.Pattern) for it in value.values()
                ):
                    patch.setattr(
                        holder, name, {key: CountedPattern(it, self) for key, it in value.items()}
                    )


class CountedPattern:
    """A pattern that counts what it looks at: a search, all up to the end of its match."""

    def __init__(self, pattern: re.Pattern[str], work: Work) -> None:
        self._pattern = pattern
        self._work = work

    def search(self, text: str, at: int = 0, stop: int = sys.maxsize) -> re.Match[str] | None:
        match = self._pattern.search(text, at, stop)
        self._work.characters += (min(stop, len(text)) if match is None else match.end()) - at
        return match

    def match(self, text: str, at: int = 0, stop: int = sys.maxsize) -> re.Match[str] | None:
        """See `re.Pattern.match`. A failed match counts as one character: it fails early."""
        match = self._pattern.match(text, at, stop)
        self._work.characters += 1 if match is None else match.end() - at
        return match

    def fullmatch(self, text: str) -> re.Match[str] | None:
        self._work.characters += len(text)
        return self._pattern.fullmatch(text)

    def sub(self, replacement: Any, text: str) -> str:
        self._work.characters += len(text)
        return self._pattern.sub(replacement, text)


def _counted(name: str) -> Any:
    """The method `name` of `str`; it counts the characters that it is limited to."""
    method = getattr(str, name)

    def counted(self: CountedText, *given: Any) -> Any:
        places = given[1:] if name in ("find", "rfind", "index", "rindex", "count") else ()
        start, stop = (*places, None, None)[:2]
        self.work.characters += len(range(len(self))[start:stop])
        return self.again(method(self, *given))

    return counted


class CountedText(str):
    """A text that counts the characters that its methods look at; so do texts that are cut from
    it and texts that it is added to."""

    work: Work

    def __new__(cls, text: str, work: Work) -> CountedText:
        made = super().__new__(cls, text)
        made.work = work
        return made

    def again(self, found: Any) -> Any:
        """What a method returned, with its texts counted."""
        if isinstance(found, str):
            return CountedText(found, self.work)
        return type(found)(map(self.again, found)) if isinstance(found, (list, tuple)) else found

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.work.characters += len(found)
        return self.again(found)

    def __add__(self, other: str) -> Any:
        """Count what is added: CPython lengthens the text in place (a test of memory checks it)."""
        self.work.characters += len(other)
        return self.again(super().__add__(other))

    def __radd__(self, other: str) -> Any:
        self.work.characters += len(other) + len(self)
        return self.again(str.__add__(other, self))

    def startswith(self, prefix: str | tuple[str, ...], *places: Any) -> bool:
        """Count the prefix, or one for each of several."""
        self.work.characters += len(prefix)
        return super().startswith(prefix, *places)

    def endswith(self, suffix: str | tuple[str, ...], *places: Any) -> bool:
        self.work.characters += len(suffix)
        return super().endswith(suffix, *places)


for _name in (
    "__contains__ __iter__ count encode find index isspace lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines strip"
).split():
    setattr(CountedText, _name, _counted(_name))


class CountedEncoder(Encoder):
    """Counts the ids that are decoded."""

    decoded = 0

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        self.decoded += len(ids)
        return super().decode(ids)
