"""Copies of messages and tools that never change, and the JSON texts that a template wrote for
them.

Invariants:

- Only the template package holds the containers of a copy, and the sandbox does not let a template
  change them. So a copy never changes, whatever happens to the original.
- A JSON text is used again only for the same object and the same arguments of `tojson`. `JsonTexts`
  holds the object, so no other object can get its id.
"""

from __future__ import annotations

import copy
import marshal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

from toolroll.parsers.reading.schema import Offered
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.runtime.unicode import replace_surrogates
from toolroll.rollout.types import Message, Tool

T = TypeVar("T")

ATOMS = frozenset({str, int, float, bool, type(None)})
TYPE_EXACT = 2
"""The last version of `marshal` whose output depends only on the types and values it writes. It
refuses subclasses, and it writes every type in a different way.
"""


def snapshot(value: T) -> T:
    """Return a copy of `value`, which shares only strings, numbers and None with it.

    Raises `TemplateError` if an object in `value` cannot be copied.
    """
    try:
        copied: T = _copied(value)
        return copied
    except RecursionError as error:
        raise TemplateError("a message or a tool is nested too deeply") from error
    except Exception as error:  # an object of another type may raise anything
        raise TemplateError(
            f"a message or a tool contains an object that cannot be copied ({error}): pass text, "
            "numbers, lists and dicts"
        ) from error


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        return {
            name: entry if type(entry) in ATOMS else _copied(entry) for name, entry in value.items()
        }
    if kind is list:
        return [_copied(entry) for entry in value]
    if kind is MappingProxyType:  # it has no copy of its own
        return MappingProxyType(_copied(dict(value)))
    return copy.deepcopy(value)


class JsonTexts:
    """What `tojson` wrote for objects that never change."""

    __slots__ = ("objects", "texts")

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.texts: dict[tuple[int, str], str] = {}

    def add(self, container: dict[str, Any] | list[Any]) -> None:
        """Keep the texts of `container`. It is plain (`_is_plain`) and belongs to a snapshot."""
        self.objects[id(container)] = container

    def with_arguments(self, messages: Sequence[Message]) -> JsonTexts:
        """Return a copy that also keeps the texts of the arguments of all tool calls of `messages`,
        which come from `snapshot`. Arguments that are not plain are left out.
        """
        texts = JsonTexts()
        texts.objects, texts.texts = self.objects.copy(), self.texts.copy()
        for message in messages:
            for call in message.get("tool_calls") or ():
                arguments = call["function"].get("arguments")
                if isinstance(arguments, dict) and _is_plain(arguments):
                    texts.add(arguments)
        return texts


_IN_USE: ContextVar[tuple[JsonTexts, ...]] = ContextVar("json_texts", default=())


@contextmanager
def json_texts(*texts: JsonTexts) -> Iterator[None]:
    """Use `texts` in the renders of this context."""
    token = _IN_USE.set(texts)
    try:
        yield
    finally:
        _IN_USE.reset(token)


def write_json(tojson: Callable[..., str], value: Any, /, *args: Any, **kwargs: Any) -> str:
    """Return `tojson(value, *args, **kwargs)`. If the text is known, `tojson` is not called."""
    for cache in _IN_USE.get():
        if id(value) in cache.objects:
            # the repr: 1 and True are equal, but may be written differently
            key = id(value), repr((args, kwargs)) if args or kwargs else ""
            text = cache.texts.get(key)
            if text is None:
                text = cache.texts[key] = tojson(value, *args, **kwargs)
            return text
    return tojson(value, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class SharedTools:
    """A snapshot of a tool list, without surrogates. Equal lists of plain values share one, so all
    episodes of an environment do.
    """

    tools: list[Tool]
    texts: JsonTexts
    plain: bool = False
    """Whether `tools` holds only strings, numbers, None, lists and dicts."""

    @classmethod
    def of(cls, tools: Sequence[Tool] | SharedTools) -> SharedTools:
        """Return the snapshot of `tools`.

        Raises `TemplateError` if a tool contains an object that cannot be copied.
        """
        if isinstance(tools, SharedTools):
            return tools
        tools = list(tools)
        try:
            shared = _shared(marshal.dumps(tools, TYPE_EXACT))
        except (ValueError, RecursionError):  # an object of another type, or too deep
            shared = None
        return shared or cls(replace_surrogates(snapshot(tools)), JsonTexts())

    @cached_property
    def offered(self) -> Offered:
        """The same tools, for a parser."""
        return Offered(self.copy())

    @cached_property
    def strings(self) -> frozenset[str]:
        """All texts in the tools, including the keys."""
        return frozenset(texts_of(self.tools))

    @cached_property
    def size(self) -> int:
        """The approximate number of characters."""
        return text_size(self.tools)

    def copy(self) -> list[Tool]:
        """Return a copy of the tools that the caller may change."""
        return snapshot(self.tools)


@lru_cache(64)
def _shared(content: bytes) -> SharedTools | None:
    """Return the tools that `marshal` wrote as `content`. Return None if they are not plain."""
    tools = marshal.loads(content)
    if not _is_plain(tools):
        return None
    tools = replace_surrogates(tools)
    texts = JsonTexts()
    for container in _containers(tools):
        texts.add(container)
    return SharedTools(tools, texts, plain=True)


def _is_plain(value: Any) -> bool:
    """Return True if `value` is strings, numbers, None, lists and dicts. No subclasses."""
    kind = type(value)
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if kind is list else kind in ATOMS


def _containers(value: Any) -> Iterator[Any]:
    """Yield `value` and all dicts and lists in it."""
    if isinstance(value, dict | list):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from _containers(part)


def text_size(value: Any) -> int:
    """Return the approximate number of characters of text in `value`."""
    size, pending = 0, [value]
    for item in pending:  # which grows
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict | list | tuple):
            pending += item.values() if isinstance(item, dict) else item
    return size


def texts_of(item: Any) -> list[str]:
    """Return all strings in nested dicts, lists and tuples, including the keys."""
    texts, pending = [], [item]
    for part in pending:  # which grows
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict | list | tuple):
            pending += (*part, *part.values()) if isinstance(part, dict) else part
    return texts
