"""The in-memory database of one episode, and the seven tools. Each tool takes the database and
strings, and returns plain data.
"""

from __future__ import annotations

import inspect
import json
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from toolroll.agents.environments.factory import openai_tool
from toolroll.environments.desk.policy import RENEWED_UNTIL, TODAY, TOPICS
from toolroll.rollout.types import Tool

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
    """Return a new database with `rows` (default: those of the hand-written tasks)."""
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


class ToolError(Exception):
    """A mistake in a tool call. The error's text becomes the observation."""


def _row(db: sqlite3.Connection, query: str, key: str, kind: str) -> sqlite3.Row:
    row = db.execute(query, (key,)).fetchone()
    if row is None:
        raise ToolError(f"there is no {kind} {key!r}")
    typed: sqlite3.Row = row
    return typed


def _member(db: sqlite3.Connection, card: str) -> sqlite3.Row:
    return _row(db, "SELECT * FROM members WHERE card = ?", card, "member with the card")


def money(cents: int) -> str:
    """Return an amount in cents as text: 250 as "2.50"."""
    return f"{cents // 100}.{cents % 100:02d}"


def find_member(db: sqlite3.Connection, card: str) -> dict[str, Any]:
    """Show a member's account: postcode, status, what is owed, loans, holds."""
    member = dict(_member(db, card))
    member["owed"] = money(member["owed"])
    loans = (
        "SELECT title, l.id AS loan_id, due, renewals FROM loans l JOIN books b ON b.id = l.book"
    )
    holds = "SELECT title, h.id AS hold_id FROM holds h JOIN books b ON b.id = h.book"
    member["loans"] = [
        dict(row) for row in db.execute(f"{loans} WHERE card = ? ORDER BY l.id", (card,))
    ]
    member["holds"] = [
        dict(row) for row in db.execute(f"{holds} WHERE card = ? ORDER BY h.id", (card,))
    ]
    return member


def search_books(db: sqlite3.Connection, title: str) -> list[dict[str, Any]]:
    """Find books by a part of the title; shows copies on the shelf and how many members wait."""
    query = """SELECT title, author, id AS book_id, kind, on_shelf,
               (SELECT count(*) FROM holds WHERE book = books.id) AS waiting
               FROM books WHERE instr(lower(title), lower(?)) > 0 ORDER BY id"""
    return [dict(row) for row in db.execute(query, (title,))]


def renew_loan(db: sqlite3.Connection, loan_id: str) -> dict[str, Any]:
    """Renew one loan until 21 days from today."""
    _row(db, "SELECT id FROM loans WHERE id = ?", loan_id, "loan")
    db.execute(
        "UPDATE loans SET due = ?, renewals = renewals + 1 WHERE id = ?", (RENEWED_UNTIL, loan_id)
    )
    return {"loan_id": loan_id, "due": RENEWED_UNTIL}


def place_hold(db: sqlite3.Connection, card: str, book_id: str) -> dict[str, Any]:
    """Put a member on the waiting list of a book."""
    _member(db, card)
    _row(db, "SELECT id FROM books WHERE id = ?", book_id, "book")
    if db.execute("SELECT 1 FROM holds WHERE card = ? AND book = ?", (card, book_id)).fetchone():
        raise ToolError(f"{card} already has a hold on {book_id}")
    (last,) = db.execute("SELECT coalesce(max(id), 'H00') FROM holds").fetchone()
    hold_id = f"H{int(last[1:]) + 1:02d}"
    db.execute("INSERT INTO holds VALUES (?, ?, ?)", (hold_id, card, book_id))
    (place,) = db.execute("SELECT count(*) FROM holds WHERE book = ?", (book_id,)).fetchone()
    return {"hold_id": hold_id, "place_in_queue": place}


def cancel_hold(db: sqlite3.Connection, hold_id: str) -> dict[str, Any]:
    """Take a hold off the waiting list."""
    _row(db, "SELECT id FROM holds WHERE id = ?", hold_id, "hold")
    db.execute("DELETE FROM holds WHERE id = ?", (hold_id,))
    return {"cancelled": hold_id}


def waive_fees(db: sqlite3.Connection, card: str) -> dict[str, Any]:
    """Set what a member owes to zero."""
    owed = _member(db, card)["owed"]
    db.execute("UPDATE members SET owed = 0, waived_on = ? WHERE card = ?", (TODAY, card))
    return {"waived": money(owed)}


def transfer_to_person(db: sqlite3.Connection, card: str, topic: str) -> dict[str, Any]:
    """Hand the chat to a person. It ends here."""
    _member(db, card)
    if topic not in TOPICS:
        raise ToolError(f"topic must be one of {', '.join(TOPICS)}, not {topic!r}")
    db.execute("INSERT INTO transfers VALUES (?, ?)", (card, topic))
    return {"transferred": topic}


_ARGUMENTS: Mapping[str, dict[str, Any]] = {
    "card": {"type": "string", "description": "The card number, such as L-1234."},
    "title": {"type": "string", "description": "A part of the title."},
    "loan_id": {"type": "string", "description": "The loan, such as N12."},
    "book_id": {"type": "string", "description": "The book, such as B12."},
    "hold_id": {"type": "string", "description": "The hold, such as H12."},
    "topic": {"type": "string", "enum": list(TOPICS)},
}


def _tool(function: Callable[..., Any]) -> Tool:
    names = list(inspect.signature(function).parameters)[1:]
    properties = {name: _ARGUMENTS[name] for name in names}
    schema = {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }
    return openai_tool(function.__name__, function.__doc__, schema)


TOOLS: Mapping[str, tuple[Callable[..., Any], Tool]] = {
    function.__name__: (function, _tool(function))
    for function in (
        find_member,
        search_books,
        renew_loan,
        place_hold,
        cancel_hold,
        waive_fees,
        transfer_to_person,
    )
}


def call_tool(db: sqlite3.Connection, name: str, arguments: object) -> Any:
    """Run one tool. Raise `ToolError` for an unknown tool or wrong arguments."""
    if name not in TOOLS:
        raise ToolError(f"there is no tool {name!r}; the tools are {', '.join(TOOLS)}")
    function, tool = TOOLS[name]
    params = tool["function"]["parameters"]["required"]
    if not isinstance(arguments, dict) or set(arguments) != set(params):
        raise ToolError(f"{name} takes an object with exactly these arguments: {', '.join(params)}")
    for key, value in arguments.items():
        if not isinstance(value, str) or len(value) > 200 or _SURROGATE.search(value):
            raise ToolError(f"{key} must be a text of at most 200 characters")
    return function(db, **arguments)


_SURROGATE = re.compile("[\ud800-\udfff]")  # SQLite stores UTF-8, which cannot encode them
