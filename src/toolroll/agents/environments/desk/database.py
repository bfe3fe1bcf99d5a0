"""The in-memory database of one episode: its tables, its rows and its final state."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Rows = Mapping[str, Sequence[Sequence[Any]]]
"""The rows of `members`, `books`, `loans` and `holds`, in the order of their columns."""

_SCHEMA = """
CREATE TABLE members (
    card TEXT PRIMARY KEY, name TEXT, postcode TEXT, tier TEXT, status TEXT, owed INTEGER,
    waived_on TEXT
);
CREATE TABLE books (id TEXT PRIMARY KEY, title TEXT, author TEXT, kind TEXT, on_shelf INTEGER);
CREATE TABLE loans (id TEXT PRIMARY KEY, card TEXT, book TEXT, due TEXT, renewals INTEGER);
CREATE TABLE holds (id TEXT PRIMARY KEY, card TEXT, book TEXT);
CREATE TABLE transfers (card TEXT, topic TEXT);
"""

# The final state. It excludes the ids of holds, because they depend on the order in which holds
# were placed.
_STATE = (
    "SELECT * FROM members ORDER BY card",
    "SELECT * FROM books ORDER BY id",
    "SELECT * FROM loans ORDER BY id",
    "SELECT card, book FROM holds ORDER BY card, book",
    "SELECT card, topic FROM transfers ORDER BY card, topic",
)


@cache
def handwritten() -> Mapping[str, Any]:
    """Return the rows and the tasks in `desk_tasks.json`."""
    data: Mapping[str, Any] = json.loads(
        Path(__file__).with_name("desk_tasks.json").read_text(encoding="utf-8")
    )
    return data


def open_database(rows: Rows | None = None) -> sqlite3.Connection:
    """Return a new database with `rows`. By default, these are the rows of the hand-written
    tasks.
    """
    # One coroutine plays an episode, but not always in the same thread.
    db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    db.row_factory = sqlite3.Row
    db.executescript(_SCHEMA)
    for table, columns in (("members", 7), ("books", 5), ("loans", 5), ("holds", 3)):
        marks = ",".join("?" * columns)
        db.executemany(f"INSERT INTO {table} VALUES ({marks})", (rows or handwritten())[table])
    return db


def final_state(db: sqlite3.Connection) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    """Return all rows that the reward depends on, sorted."""
    return tuple(tuple(tuple(row) for row in db.execute(query)) for query in _STATE)
