"""`desk`: a small benchmark, the service desk of a lending library, in one file and without a
server.

Invariants: every episode has its own in-memory SQLite database with the same rows; the reward is
1.0 if the final database equals that of the reference actions and the replies contain the required
facts, else 0.0; any arguments result in an observation; nothing is executed after `done`.

The rows and the tasks are in `desk_tasks.json` in the same folder.
"""

from __future__ import annotations

import inspect
import json
import re
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from toolroll.agents.users.stop import STOP_MARKER, is_stop
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import ActionError, UsageError
from toolroll.rollout.types import (
    Action,
    Environment,
    EnvironmentOptions,
    Message,
    Observation,
    StepResult,
    Task,
    Tool,
    UserSimulator,
)

TODAY = "2031-03-10"
RENEWED_UNTIL = "2031-03-31"
TOPICS = ("lost_item", "blocked_card", "complaint")

POLICY = f"""You are the service desk of the Lantern Street Library. Today is {TODAY}. You help members by chat, with
the tools you have. What the tools let you do and what the rules allow is not the same: the rules below decide.

Who you talk to
- Ask for the card number and the postcode first, and look the member up. Where the two do not belong together, change
  nothing and tell nothing of the account (rule A1).
- A member whose card is blocked is transferred at once, topic blocked_card; nothing else is done.
- A lost book (topic lost_item) and a complaint about staff (topic complaint) are transferred too, once the member is
  known. Nothing else is transferred.

Renewing a loan gives 21 days from today. Not allowed
- R1: after two renewals of the same loan; Plus members, after four.
- R2: while another member has a hold on the book (search_books shows how many wait).
- R3: when the loan is more than 14 days overdue.
- R4: while the member owes more than 10.00. This rule forbids new holds, too.

Placing a hold. Not allowed
- H1: beyond three holds at a time; Plus members, five.
- H2: on a book of which a copy is on the shelf; tell the member to come and take it.
- H3: on reference books.
A member may cancel holds of their own at any time.

Waiving fees
- F1: only where everything that is owed comes to 5.00 or less; never a part of it.
- F2: not within twelve months of the last waiver.

How you answer
- Do what was asked as soon as you know enough, without asking for a confirmation, and nothing that was not asked for.
- Where a rule forbids a request, do not do it, and name that rule by its code, for example "rule R3". Name no rules
  that do not apply. Still do the rest of what was asked.
- After a renewal tell the new date, after a hold the place in the queue as a number, after a waiver the amount.
- Write dates as {TODAY} and money as 4.50.
"""  # noqa: E501

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

# The final state. It excludes the ids of holds, which depend on the order in which holds were
# placed.
_STATE = (
    "SELECT * FROM members ORDER BY card",
    "SELECT * FROM books ORDER BY id",
    "SELECT * FROM loans ORDER BY id",
    "SELECT card, book FROM holds ORDER BY card, book",
    "SELECT card, topic FROM transfers ORDER BY card, topic",
)


@cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(
        Path(__file__).with_name("desk_tasks.json").read_text(encoding="utf-8")
    )
    return data


def open_database() -> sqlite3.Connection:
    """Return a new database, with the same rows each time."""
    # One coroutine plays an episode, but not always in the same thread.
    db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    db.row_factory = sqlite3.Row
    db.executescript(_SCHEMA)
    for table, marks in (
        ("members", "?,?,?,?,?,?,?"),
        ("books", "?,?,?,?,?"),
        ("loans", "?,?,?,?,?"),
        ("holds", "?,?,?"),
    ):
        db.executemany(f"INSERT INTO {table} VALUES ({marks})", _data()[table])
    return db


def final_state(db: sqlite3.Connection) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    """Return all rows that the reward depends on, in an order that depends only on the rows."""
    return tuple(tuple(tuple(row) for row in db.execute(query)) for query in _STATE)


# --- tools: each takes the database and strings, and returns plain data ---------------------------


class ToolError(Exception):
    """A tool was called with something that does not exist; the text is the observation."""


def _row(db: sqlite3.Connection, query: str, key: str, what: str) -> sqlite3.Row:
    row = db.execute(query, (key,)).fetchone()
    if row is None:
        raise ToolError(f"there is no {what} {key!r}")
    found: sqlite3.Row = row
    return found


def _member(db: sqlite3.Connection, card: str) -> sqlite3.Row:
    return _row(db, "SELECT * FROM members WHERE card = ?", card, "member with the card")


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


def find_member(db: sqlite3.Connection, card: str) -> dict[str, Any]:
    """Show a member's account: postcode, status, what is owed, loans, holds."""
    member = dict(_member(db, card))
    member["owed"] = _money(member["owed"])
    loans = (
        "SELECT l.id AS loan_id, l.book AS book_id, title, due, renewals FROM loans l JOIN "
        "books b ON b.id = l.book"
    )
    holds = (
        "SELECT h.id AS hold_id, h.book AS book_id, title FROM holds h JOIN books b ON b.id = "
        "h.book"
    )
    member["loans"] = [
        dict(row) for row in db.execute(f"{loans} WHERE card = ? ORDER BY l.id", (card,))
    ]
    member["holds"] = [
        dict(row) for row in db.execute(f"{holds} WHERE card = ? ORDER BY h.id", (card,))
    ]
    return member


def search_books(db: sqlite3.Connection, title: str) -> list[dict[str, Any]]:
    """Find books by a part of the title; shows copies on the shelf and how many members wait."""
    query = """SELECT id AS book_id, title, author, kind, on_shelf,
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
    return {"waived": _money(owed)}


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
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": function.__doc__,
            "parameters": schema,
        },
    }


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
    """Run one tool. Raises `ToolError`, and only that, for an unknown tool or wrong arguments."""
    if name not in TOOLS:
        raise ToolError(f"there is no tool {name!r}; the tools are {', '.join(TOOLS)}")
    function, tool = TOOLS[name]
    wanted = tool["function"]["parameters"]["required"]
    if not isinstance(arguments, dict) or set(arguments) != set(wanted):
        raise ToolError(f"{name} takes an object with exactly these arguments: {', '.join(wanted)}")
    for key, value in arguments.items():
        if not isinstance(value, str) or len(value) > 200 or _SURROGATE.search(value):
            raise ToolError(f"{key} must be a text of at most 200 characters")
    return function(db, **arguments)


_SURROGATE = re.compile("[\ud800-\udfff]")  # SQLite stores UTF-8, which has none


# --- the member, the reference, the reward --------------------------------------------------------


class DeskUser:
    """The scripted member: sends the request, then one missing detail per turn, agrees to
    questions, and stops.
    """

    PATIENCE = 3
    """Number of questions that it agrees to after its last detail."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._opening = task["opening"]
        self._lines = _details(task)
        self._calls = 0
        self._agreed = 0

    async def reset(self, instruction: str) -> str:
        """Return the request. `instruction` has no effect: it is for models."""
        return str(self._opening)

    async def step(self, content: str) -> str:
        """Return the next detail; after the last one, "yes" to a question, or thanks and the stop
        marker.
        """
        self._calls += 1
        if self._lines:
            return self._lines.pop(0)
        if content.rstrip().endswith("?") and self._agreed < self.PATIENCE:
            self._agreed += 1
            return "Yes, please."
        return f"Thank you, that is all. {STOP_MARKER}"

    def metrics(self) -> Mapping[str, float]:
        """Return the number of replies that the member received."""
        return {"user_calls": float(self._calls)}

    async def close(self) -> None:
        """Do nothing: there are no resources to release."""


def _details(task: Mapping[str, Any]) -> list[str]:
    return [f"My card is {task['card']}, the postcode {task['postcode']}.", *task.get("more", ())]


def reference(task: Task) -> list[Action]:
    """Return the actions with which an agent earns 1.0 in `task`, with the scripted member."""
    data = task.data
    steps = [Action("Welcome! May I have your card number and your postcode?")]
    steps += [Action("I see. Anything else?") for _ in data.get("more", ())]
    calls = [("find_member", {"card": data["card"]}), *data["actions"]]
    steps += [Action("", (ToolCall(name, dict(arguments), ""),)) for name, arguments in calls]
    if calls[-1][0] != "transfer_to_person":
        steps.append(
            Action(" ".join(["All settled.", *(f"Please note: {text}." for text in data["told"])]))
        )
    return steps


def normalise(text: str) -> str:
    """Return `text` normalized for comparison: compatibility forms (such as full-width digits)
    unified, lower case, no thousands separators, ordinals as numbers.
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", plain)
    return re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", plain)


def is_told(wanted: str, replies: Sequence[str]) -> bool:
    """Return True if one of `replies` has `wanted` as a separate word or number ("3" is not in "13"
    or "3.50").
    """
    pattern = re.compile(rf"(?<!\w)(?<!\d[.-]){re.escape(normalise(wanted))}(?!\w|[.-]\d)")
    return any(pattern.search(normalise(reply)) for reply in replies)


_CODE = re.compile(r"\b[arhf][1-4]\b")


def judge(task: Task, state: object, replies: Sequence[str]) -> tuple[float, str | None]:
    """Return 1.0 if `state` is the reference's and the replies contain the required facts; else 0.0
    and the reason.

    If a rule's code is required, any other code in the replies results in 0.0, so that reciting the
    list of rules does not count.
    """
    told = [str(text) for text in task.data["told"]]
    codes = {normalise(text) for text in told} & set(_CODE.findall(normalise(" ".join(told))))
    extra = {code for reply in replies for code in _CODE.findall(normalise(reply))} - codes
    untold = [text for text in told if not is_told(text, replies)]
    if state != _reference_state(task):
        return 0.0, "the database is not in the reference's final state"
    if untold:
        return 0.0, f"the member was not told {', '.join(map(repr, untold))}"
    if codes and extra:
        return 0.0, f"the member was told codes that do not apply: {', '.join(sorted(extra))}"
    return 1.0, None


def _reference_state(task: Task) -> object:
    db = open_database()
    try:
        for name, arguments in task.data["actions"]:
            call_tool(db, name, arguments)
        return final_state(db)
    finally:
        db.close()


class Desk(Environment):
    """One conversation at the desk. Its state is the episode's database and the messages so far."""

    blocking = False

    def __init__(self, options: EnvironmentOptions) -> None:
        self._options = options
        self._task: Task | None = None
        self._db: sqlite3.Connection | None = None
        self._user: UserSimulator | None = None
        self._done = False
        self._replies: list[str] = []
        self._tool_errors: Counter[str] = Counter()

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start `task`. `seed` is passed to a simulated user; nothing else is random."""
        await self.close()
        self._task, self._done, self._replies, self._tool_errors = task, False, [], Counter()
        self._db = open_database()
        self._user = self._options.user(seed) if self._options.user else DeskUser(task.data)
        instruction = (
            f"You write to your library. {task.data['opening']} {' '.join(_details(task.data))}"
        )
        opening = await self._user.reset(instruction)
        tools = [tool for _, tool in TOOLS.values()]
        return Observation(
            [{"role": "system", "content": POLICY}, {"role": "user", "content": opening}], tools
        )

    async def step(self, action: Action) -> StepResult:
        """Run the calls, or send the text to the member.

        Raise `ActionError` if the reply is empty, `UsageError` before `reset` and after `done`, and
        what the user simulator raises.
        """
        if self._db is None or self._user is None or self._task is None:
            raise UsageError("desk: step was called before reset(task, seed)")
        if self._done:
            raise UsageError("desk: the episode is over: make a new environment for the next one")
        if not action.tool_calls and not action.content.strip():
            raise ActionError("The reply is empty: call a tool, or write something to the member.")
        if action.content.strip():
            self._replies.append(action.content)
        if action.tool_calls:
            messages = [self._call(self._db, call) for call in action.tool_calls]
        else:
            line = await self._user.step(action.content)
            self._done = is_stop(line)
            messages = [{"role": "user", "content": line}]
        if not self._done:
            return StepResult(messages)
        reward, reason = judge(self._task, final_state(self._db), self._replies)
        return StepResult(messages, reward, True, info={"reward_reason": reason} if reason else {})

    def _call(self, db: sqlite3.Connection, call: ToolCall) -> Message:
        message: Message = {"role": "tool", "tool_call_id": call.id, "name": call.name}
        try:
            if self._done:
                raise ToolError("not run: the chat was handed to a person by the call before")
            content = json.dumps(call_tool(db, call.name, call.arguments), ensure_ascii=False)
            self._done = call.name == "transfer_to_person"
        except ToolError as error:
            self._tool_errors[call.name] += 1
            content = f"Error: {error}"
        return message | {"content": content}

    def metrics(self) -> Mapping[str, float]:
        """Return `tool_errors`, in all and by tool, and the user's metrics."""
        errors = {f"tool_errors/{name}": float(count) for name, count in self._tool_errors.items()}
        return {
            "tool_errors": float(self._tool_errors.total()),
            **errors,
            **(self._user.metrics() if self._user else {}),
        }

    async def close(self) -> None:
        """Close the database and the user."""
        db, self._db = self._db, None
        if db is not None:
            db.close()
            if self._user is not None:
                await self._user.close()


class DeskFactory:
    """The factory of the benchmark."""

    name = "desk"
    description = (
        "The service desk of a lending library: 33 tasks, seven tools, no server and no download."
    )
    splits: tuple[str, ...] = ("test",)

    def missing(self) -> str | None:
        """Return None: nothing needs to be installed."""
        return None

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks in order. Raise `UsageError` for an unknown split."""
        if split not in self.splits:
            raise UsageError(f"desk has no split {split!r}; it has {', '.join(self.splits)}")
        return [Task(task["id"], index, split, task) for index, task in enumerate(_data()["tasks"])]

    def make(self, options: EnvironmentOptions) -> Desk:
        """Return a new desk. Raise `UsageError` for any setting: desk has none."""
        if options.settings:
            raise UsageError(f"desk takes no settings, got: {', '.join(sorted(options.settings))}")
        return Desk(options)

    def reference(self, task: Task) -> Sequence[Action]:
        """Return the actions that earn 1.0."""
        return reference(task)


DESK = DeskFactory()
