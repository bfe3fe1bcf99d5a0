"""Copies of the databases for episodes, and a comparison of databases.

A deep copy of airline's database takes 0.25 s, most of it for the flights. A tool can change a
flight only through `_get_flight` (inspect-evals 0.26.0). So episodes share the flights and copy a
flight when that method first returns it. The small tables are copied.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import orjson
from pydantic import TypeAdapter

_TOOLS_OF_ONE_DATABASE = {"db", "initialized"}


def copies(made: Any) -> Callable[[], Any]:
    """Return a function that makes copies of `made`, which is one of the wheel's tool objects."""
    kind = type(made)
    if set(kind.model_fields) != _TOOLS_OF_ONE_DATABASE:
        return lambda: copy.deepcopy(made)
    if "flights" in type(made.db).model_fields:
        return _airline_copies(made)
    database, text = type(made.db), made.db.model_dump_json()
    return lambda: kind(db=database.model_validate_json(text), initialized=True)


def _airline_copies(made: Any) -> Callable[[], Any]:
    database = type(made.db)
    parts = {
        name: TypeAdapter(database.model_fields[name].annotation)
        for name in ("users", "reservations")
    }
    texts = {name: part.dump_json(getattr(made.db, name)) for name, part in parts.items()}
    kind = _with_own_flights(type(made))

    def make() -> Any:
        small = {name: part.validate_json(texts[name]) for name, part in parts.items()}
        return kind(
            db=database.model_construct(flights=dict(made.db.flights), **small), initialized=True
        )

    return make


def _with_own_flights(kind: type[Any]) -> type[Any]:
    """Return a subclass of `kind` whose objects copy a flight when they first read it."""

    def get_flight(self: Any, flight_number: str) -> Any:
        flight = kind._get_flight(self, flight_number)
        if flight_number not in self._own:
            self._own.add(flight_number)
            flight = self.db.flights[flight_number] = copy.deepcopy(flight)
        return flight

    body = {
        "__module__": kind.__module__,
        "__annotations__": {"_own": set},
        "_own": set(),
        "_get_flight": get_flight,
    }
    return type(kind.__name__, (kind,), body)


def quick_digest(database: Any) -> str:
    """Return a hash of a database. Databases with equal hashes are equal. If the hashes differ,
    compare `digest`, because the databases may differ only in the order of keys.
    """
    return hashlib.sha256(database.model_dump_json().encode()).hexdigest()


def digest(database: Any) -> str:
    """Return a hash that does not depend on the order of keys. Two databases have equal digests if
    their tau2 hashes are equal.
    """
    data = orjson.loads(database.model_dump_json())
    return hashlib.sha256(orjson.dumps(data, option=orjson.OPT_SORT_KEYS)).hexdigest()
