"""What a good model would reply: the reference actions, with the thoughts that lead to them.

A thought quotes facts from the conversation. If a fact concerns a rule, the thought adds `ok`, or
the rule's code if the rule is broken. The facts are copied verbatim, because copying is what a
small model does best.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from toolroll import Action, Task
from toolroll.environments.desk import reference
from toolroll.environments.desk.tools import money
from toolroll.testing.reference_policy import write_action

Facts = Mapping[str, Any]
Fact = tuple[str, str | None]
"""A quoted fact, and the code of the rule that it concerns, or None."""

_LOAN = ("title", "loan_id", "due", "renewals")
_HOLD = ("title", "hold_id")


def replies(task: Task) -> list[str]:
    """Return the texts of the model's turns in the generated task `task`."""
    turns = zip(_thoughts(task.data), reference(task), strict=True)
    return [_said(thought, action) for thought, action in turns]


def quote(row: Mapping[str, Any], *names: str) -> str:
    """Return fields of a JSON object as `json.dumps` writes them, without the brackets."""
    return json.dumps({name: row[name] for name in names})[1:-1]


def account(data: Facts) -> dict[str, Any]:
    """Return the result of `find_member` for the member of the task."""
    names = ("card", "name", "postcode", "tier", "status", "owed", "waived_on")
    rows = data["rows"]
    titles = {book[0]: book[1] for book in rows["books"]}
    shown: dict[str, Any] = dict(zip(names, rows["members"][0], strict=True))
    shown["owed"] = money(shown["owed"])
    card = shown["card"]
    shown["loans"] = [
        {"title": titles[book], "loan_id": loan, "due": due, "renewals": renewals}
        for loan, owner, book, due, renewals in rows["loans"]
        if owner == card
    ]
    shown["holds"] = [
        {"title": titles[book], "hold_id": hold}
        for hold, owner, book in rows["holds"]
        if owner == card
    ]
    return shown


def found_book(data: Facts, title: str) -> dict[str, Any]:
    """Return the entry of the book in the result of `search_books`."""
    rows = data["rows"]
    [row] = [row for row in rows["books"] if row[1] == title]
    book_id, title, author, kind, on_shelf = row
    return {
        "title": title,
        "author": author,
        "book_id": book_id,
        "kind": kind,
        "on_shelf": on_shelf,
        "waiting": sum(hold[2] == book_id for hold in rows["holds"]),
    }


def identity(given: str, member: Facts) -> str:
    """Return the comparison of the postcode that the member gave with the account's.

    Only one token is between the two postcodes, so a head that looks back two tokens sees both at
    once. With the name of the field between them, some seeds never learn to compare the postcodes.
    """
    right = given == member["postcode"]
    account = member["postcode"]
    return f"the postcode {given}, in the account {account} {'ok' if right else 'A1'}"


def loan(member: Facts, title: str) -> Facts:
    """Return the loan of a title."""
    [row] = [row for row in member["loans"] if row["title"] == title]
    return row


def hold(member: Facts, title: str) -> Facts:
    """Return the hold on a title."""
    [row] = [row for row in member["holds"] if row["title"] == title]
    return row


def _said(thought: str, action: Action) -> str:
    text = write_action(action)
    return f"<think>{thought}</think>{text}" if thought else text


def _thoughts(data: Facts) -> Iterator[str]:
    """Yield the thought before each reference action."""
    yield ""  # the greeting
    yield ""  # the call of find_member
    member, requests = account(data), data["requests"]
    start = identity(data["postcode"], member)
    if start.endswith("A1"):
        yield start
        return
    start += f"\n{quote(member, 'status')} "
    if member["status"] == "blocked":
        yield start + "blocked"
        return
    start += "ok\n"
    for request in requests:
        yield from _settling(start, request, member, data)
        start = ""


def _settling(start: str, request: Facts, member: Facts, data: Facts) -> Iterator[str]:
    """Yield the thoughts before each call and reply for one request."""
    kind, title = request["kind"], request["title"]
    facts: list[Fact] = []
    if kind in ("renew", "hold"):
        yield f"{start}{kind} {title}"
        facts = (
            _renewal(member, loan(member, title), found_book(data, title))
            if kind == "renew"
            else _holding(member, found_book(data, title))
        )
    elif kind == "cancel":
        facts = [(f"{start}cancel {quote(hold(member, title), *_HOLD)}", None)]
    elif kind == "due":
        facts = [(f"{start}due {quote(loan(member, title), *_LOAN)}", None)]
    elif kind == "owed":
        facts = [(f"{start}owed {quote(member, 'owed')}", None)]
    elif kind == "waive":
        owed, waived_on = quote(member, "owed"), quote(member, "waived_on")
        facts = [(f"{start}waive {owed}", "F1"), (waived_on, "F2")]
    else:
        facts = [(f"{start}{kind} {title}".rstrip(), None)]
    yield _judged(facts, set(request["told"]))
    # After its last call, the model has only to report.
    if request["reply"] and len(request["actions"]) > (kind in ("renew", "hold")):
        yield ""


def _renewal(member: Facts, row: Facts, book: Facts) -> list[Fact]:
    return [
        (f"{quote(member, 'tier')}\n{quote(row, *_LOAN)}", "R1"),
        (quote(book, "waiting"), "R2"),
        (quote(row, "due"), "R3"),
        (quote(member, "owed"), "R4"),
    ]


def _holding(member: Facts, book: Facts) -> list[Fact]:
    return [
        (quote(book, "title", "author", "book_id", "kind"), "H3"),
        (quote(book, "on_shelf"), "H2"),
        (f"{quote(member, 'tier')}, {len(member['holds'])} holds", "H1"),
        (quote(member, "owed"), "R4"),
    ]


def _judged(facts: list[Fact], broken: set[str]) -> str:
    """Return one line for each fact, up to the first that breaks its rule."""
    lines = []
    for fact, code in facts:
        lines.append(fact if code is None else f"{fact} {code if code in broken else 'ok'}")
        if code in broken:
            break
    return "\n".join(lines)
