"""`Database`: one domain's database. Every episode gets a lazy copy of it.

A copy creates a record, and the lists and dicts in it, when they are first read. A full copy of
retail would take 6 ms, and 6 MiB of small objects per live episode. For airline, it would take 14
ms and 13 MiB. Python's garbage collector would visit these objects repeatedly: with full copies for
64 live episodes, it blocked the event loop for 100 ms at a time. Most of the objects are never
needed, because a search reads only one or two fields of each record.

Invariants:

- A copy behaves like the dict that tau-bench loads: it has the same keys, order and values. Once a
  value was read, it stays the same object.
- No episode sees another episode's changes.
- Two databases have equal `changes` if and only if their tau-bench hashes are equal. (`1`, `1.0`
  and `True` differ; the order of keys does not matter.)
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Changes = Mapping[tuple[str, str | None], str | None]
"""The differences from the loaded database. They map (table, key) to the record's text that
tau-bench hashes, or to None if the record was removed. If a table is not a dict of records, its key
is None.
"""

_VERSION = 2
"""The version of marshal. It is the last one whose bytes depend only on values, not on shared
objects.
"""
_ATOMS = frozenset({str, int, float, bool, type(None)})

_get = dict.__getitem__  # a global, since super() takes longer than the look-up itself


class Stored(dict[str, Any]):
    """A record as loaded, which all copies share: lists and dicts are serialized to bytes."""

    __slots__ = ()


class Table(dict[str, Any]):
    """A table or a record whose values are created when they are first read.

    An unread value is kept as a `Stored` record or as bytes. JSON has neither type, so an unread
    value cannot be confused with one that was read. Python code and its `json` module read a
    `Table` like any dict. C code that bypasses the methods of a subclass (`orjson`) needs
    `dict(table)`.
    """

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        value = _get(self, key)
        if type(value) is bytes:
            value = marshal.loads(value)
            super().__setitem__(key, value)
        elif type(value) is Stored:
            value = Table(value)
            super().__setitem__(key, value)
        return value

    def __iter__(self) -> Iterator[str]:
        # Overridden so that dict(table) and {**table} read the values. Otherwise they would copy
        # the unread stand-ins.
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def raw(self) -> Iterator[tuple[str, Any]]:
        """Return the items without creating values. Unread values are `Stored` or bytes."""
        return iter(super().items())

    def read_all(self) -> None:
        """Create every value."""
        for key in self:
            self[key]

    def __eq__(self, other: object) -> bool:
        self.read_all()
        if isinstance(other, Table):
            other.read_all()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _whole(name: str) -> Callable[..., Any]:
    """Return a method for `Table` that reads every value and then calls the `dict` method
    `name`.
    """
    method = getattr(dict, name)

    def call(table: Table, *arguments: Any) -> Any:
        table.read_all()
        return method(table, *arguments)

    return call


for _name in ("values", "items", "pop", "popitem", "setdefault", "copy", "__or__", "__repr__"):
    setattr(Table, _name, _whole(_name))


class Database:
    """One domain's database. `data`: tables of records, as tau-bench loads them. `to_hashable` and
    `consistent_hash` are tau-bench's own functions.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        to_hashable: Callable[[Any], Any],
        consistent_hash: Callable[[Any], str],
    ) -> None:
        self._to_hashable = to_hashable
        self._consistent_hash = consistent_hash
        self._tables: dict[str, dict[str, Stored | bytes] | bytes] = {}
        for name, table in data.items():
            if _has_names(table):
                self._tables[name] = {key: _stored(record) for key, record in table.items()}
            else:
                self._tables[name] = marshal.dumps(table, _VERSION)

    def copy(self) -> dict[str, Any]:
        """Return a database for one episode. It costs one pointer per record, not a full copy."""
        return {
            name: marshal.loads(table) if isinstance(table, bytes) else Table(table)
            for name, table in self._tables.items()
        }

    def changes(self, data: Mapping[str, Any]) -> Changes:
        """Return how `data`, a changed `copy()`, differs from the loaded database."""
        changes: dict[tuple[str, str | None], str | None] = {
            (name, None): None for name in self._tables.keys() - data.keys()
        }
        for name, table in data.items():
            base = self._tables.get(name)
            if isinstance(base, dict) and isinstance(table, dict):
                changes.update({(name, key): None for key in base.keys() - table.keys()})
                for key, record in table.raw() if isinstance(table, Table) else table.items():
                    if self._differs(record, base.get(key)):
                        changes[name, key] = self._text(record)
            elif self._differs(table, base if isinstance(base, bytes) else None):
                changes[name, None] = self._text(table)
        return changes

    def _differs(self, now: Any, base: Stored | bytes | None) -> bool:
        """Return True if the record or table `now` is not the loaded one, `base`."""
        if base is None:
            return True
        return not _is_still(now, base) and self._text(now) != self._text(_plain(base))

    def _text(self, value: Any) -> str:
        return repr(self._to_hashable(value))

    def hash(self, data: Mapping[str, Any]) -> str:
        """Return tau-bench's hash of `data`. This takes tenths of a second."""
        return self._consistent_hash(self._to_hashable(data))


def _has_names(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


def _stored(record: Any) -> Stored | bytes:
    if not _has_names(record):
        return marshal.dumps(record, _VERSION)
    return Stored(
        (key, field if type(field) in _ATOMS else marshal.dumps(field, _VERSION))
        for key, field in record.items()
    )


def _plain(stored: Stored | bytes) -> Any:
    if isinstance(stored, bytes):
        return marshal.loads(stored)
    return {
        key: marshal.loads(field) if type(field) is bytes else field
        for key, field in stored.items()
    }


def _is_still(now: Any, base: Any) -> bool:
    """Return True if `now` certainly equals `base`. Return False if it may differ."""
    if now is base:
        return True
    if type(base) is Stored:
        return (
            type(now) is Table
            and now.keys() == base.keys()
            and all(_is_still(field, base[key]) for key, field in now.raw())
        )
    return type(base) is bytes and _dumped(now) == base


def _dumped(value: Any) -> bytes | None:
    try:
        return marshal.dumps(value, _VERSION)
    except ValueError:  # a type that marshal does not support, made by a tool
        return None
