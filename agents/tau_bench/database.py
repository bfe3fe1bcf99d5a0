"""`Database`: one domain's database, kept as bytes, of which every episode gets a copy that is filled in as it is read.

Invariants: a copy behaves as the dict that tau-bench loads (same keys, order and values; what is read once stays the same object);
nothing that an episode does to its copy is seen by another; two databases have equal `changes` exactly when tau-bench's own hash
of them is equal (`1`, `1.0` and `True` differ there, the order of keys does not).
"""

from __future__ import annotations

import copy
import marshal
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

Changes = Mapping[tuple[str, str | None], str | None]
"""What differs from the database as loaded: (table, key) -> the record's hashable text, None where it was removed. A table that
is no dict of records has the key None."""

_VERSION = 2
"""Of marshal: the last one whose bytes depend on values alone, and not on which objects are shared."""

_ATOMS = frozenset({str, int, float, bool, type(None)})
_NOTHING = object()
_get = dict.__getitem__  # as a global, since super() takes longer than the look-up itself


class Unread:
    """Stands in a table for a record, and in a record for a list or a dict, that nobody has read yet.

    `fields` are those of a record, shared by all copies; anything else is kept as bytes alone. Reading a record makes none of its
    fields: a search looks at a field or two of each, and what is made is memory that the garbage collector has to visit.
    """

    __slots__ = ("blob", "fields")

    def __init__(self, value: Any, *, record: bool = False) -> None:
        self.fields: dict[str, Any] | None = None
        self.blob = b""
        if record and _has_names(value):
            self.fields = {key: field if type(field) in _ATOMS else Unread(field) for key, field in value.items()}
        else:
            self.blob = marshal.dumps(value, _VERSION)

    def read(self) -> Any:
        """The value, one of its own for each call."""
        return marshal.loads(self.blob) if self.fields is None else Table(self.fields)

    def plain(self) -> Any:
        """The same, made of plain dicts and whole."""
        if self.fields is None:
            return marshal.loads(self.blob)
        return {key: field.plain() if type(field) is Unread else field for key, field in self.fields.items()}

    def is_still(self, now: Any) -> bool:
        """Whether `now` is at a glance what this stands for. False does not say that it is not."""
        if self.fields is None:
            return _dumped(now) == self.blob
        if type(now) is not Table or len(now) != len(self.fields):
            return False
        for key, value in now.raw():
            field = self.fields.get(key, _NOTHING)
            if value is not field and not (type(field) is Unread and field.is_still(value)):
                return False
        return True


class Table(dict[str, Any]):
    """A table, or a record, whose values are made when they are first read: in every way in which Python, and its `json`, reads a
    dict. Code in C that reads past the methods of a subclass (`orjson`) needs `dict(table)`."""

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        value = _get(self, key)
        if type(value) is Unread:
            value = value.read()
            super().__setitem__(key, value)
        return value

    def __iter__(self) -> Iterator[str]:
        # Its own, so that dict(table) and {**table} read the values instead of copying what stands in for them.
        return super().__iter__()

    def raw(self) -> Iterator[tuple[str, Any]]:
        """The items as they are, `Unread` ones included."""
        return iter(super().items())

    def _read_all(self) -> None:
        for key, value in super().items():
            if type(value) is Unread:
                super().__setitem__(key, value.read())

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def values(self) -> Any:
        return _Values(self)

    def items(self) -> Any:
        return _Items(self)

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            self[key]
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        self._read_all()
        return super().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else super().setdefault(key, default)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __eq__(self, other: object) -> bool:
        self._read_all()
        if isinstance(other, Table):
            other._read_all()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        merged = self.copy()
        merged.update(other)
        return merged

    def __repr__(self) -> str:
        self._read_all()
        return super().__repr__()

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: value.plain() if type(value) is Unread else copy.deepcopy(value, memo) for key, value in self.raw()}


class _Items(ItemsView[str, Any]):
    """A table's items, each made when it is reached: a search that ends early reads no further."""

    _mapping: Table

    def __reversed__(self) -> Iterator[tuple[str, Any]]:
        return ((key, self._mapping[key]) for key in reversed(self._mapping))

    def __repr__(self) -> str:
        return f"dict_items({list(self)!r})"


class _Values(ValuesView[Any]):
    """A table's values, in the same way."""

    _mapping: Table

    def __reversed__(self) -> Iterator[Any]:
        return (self._mapping[key] for key in reversed(self._mapping))

    def __repr__(self) -> str:
        return f"dict_values({list(self)!r})"


class Database:
    """`data` is tau-bench's: tables of records. `to_hashable` and `consistent_hash` are its own functions."""

    def __init__(
        self,
        data: Mapping[str, Any],
        to_hashable: Callable[[Any], Any],
        consistent_hash: Callable[[Any], str],
    ) -> None:
        self._to_hashable = to_hashable
        self._consistent_hash = consistent_hash
        self._tables: dict[str, Mapping[str, Unread] | Unread] = {}
        for name, table in data.items():
            if _has_names(table):
                self._tables[name] = {key: Unread(record, record=True) for key, record in table.items()}
            else:
                self._tables[name] = Unread(table)
        self._texts: Mapping[str, Mapping[str, str] | str] | None = None

    def copy(self) -> dict[str, Any]:
        """A database of its own for one episode. Costs one pointer a record, not the database."""
        return {name: table.read() if isinstance(table, Unread) else Table(table) for name, table in self._tables.items()}

    def changes(self, data: Mapping[str, Any]) -> Changes:
        """How `data`, a changed `copy()`, differs from the database as loaded."""
        found: dict[tuple[str, str | None], str | None] = {}
        for name in self._tables.keys() - data.keys():
            found[name, None] = None
        for name, table in data.items():
            base = self._tables.get(name)
            if isinstance(base, Mapping) and isinstance(table, dict):
                found.update(self._table_changes(name, base, table))
            else:
                self._note(found, (name, None), base if isinstance(base, Unread) else None, table)
        return found

    def _table_changes(self, name: str, base: Mapping[str, Unread], table: dict[str, Any]) -> Changes:
        found: dict[tuple[str, str | None], str | None] = {(name, key): None for key in base.keys() - table.keys()}
        for key, record in table.raw() if isinstance(table, Table) else table.items():
            if type(record) is not Unread:
                self._note(found, (name, key), base.get(key), record)
        return found

    def _note(
        self, found: dict[tuple[str, str | None], str | None], place: tuple[str, str | None], base: Unread | None, now: Any
    ) -> None:
        """Add the record at `place` to `found` if it is another one than at first."""
        if base is not None and base.is_still(now):
            return
        text = self._text(now)
        if base is None or text != self._text(base.plain()):
            found[place] = text

    def _text(self, value: Any) -> str:
        return repr(self._to_hashable(value))

    # --- tau-bench's hash ------------------------------------------------------------------------------------------------

    def hash(self, changes: Changes) -> str:
        """tau-bench's hash of the database with `changes`, made of the records' texts instead of the records.

        Milliseconds instead of tenths of a second; the first call makes all texts.
        """
        texts = self._all_texts()
        parts = []
        for name in sorted({*texts, *(name for name, _ in changes)}):
            whole = changes.get((name, None), "")
            if whole is None:
                continue
            text = whole or self._table_text(name, texts.get(name, {}), changes)
            parts.append(f"({name!r}, {text})")
        return self._consistent_hash(_tuple_text(parts))

    def _table_text(self, name: str, base: Mapping[str, str] | str, changes: Changes) -> str:
        if isinstance(base, str):
            return base
        changed = {key: text for (table, key), text in changes.items() if table == name and key is not None}
        records = {**base, **changed}
        return _tuple_text([f"({key!r}, {text})" for key, text in sorted(records.items()) if text is not None])

    def _all_texts(self) -> Mapping[str, Mapping[str, str] | str]:
        if self._texts is None:
            self._texts = {
                name: self._text(table.plain())
                if isinstance(table, Unread)
                else {key: self._text(record.plain()) for key, record in table.items()}
                for name, table in self._tables.items()
            }
        return self._texts


def _tuple_text(parts: list[str]) -> str:
    """What `repr` makes of a tuple whose elements' texts are `parts`."""
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _has_names(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


def _dumped(value: Any) -> bytes | None:
    try:
        return marshal.dumps(value, _VERSION)
    except ValueError:  # something that a tool made and marshal does not know
        return None
