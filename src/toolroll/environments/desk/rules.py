"""The rules of `policy.POLICY` as code, for generated tasks. The tools do not enforce them.

`Library` has the database rows of one generated task. They change when a request is settled.

`choices` returns the objects that a request may refer to. `SETTLE` maps each kind of request to a
function that settles the request, or refuses it because of a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolroll.environments.desk.policy import RENEWED_UNTIL, TODAY
from toolroll.environments.desk.tools import money


@dataclass
class Member:
    """A row of `members`. `owed` is in cents. `waived_on` is empty if nothing was ever waived."""

    card: str
    name: str
    postcode: str
    tier: str
    status: str
    owed: int
    waived_on: str


@dataclass
class Book:
    """A row of `books`."""

    id: str
    title: str
    author: str
    kind: str
    on_shelf: int


@dataclass
class Loan:
    """A row of `loans`."""

    id: str
    card: str
    book: str
    due: str
    renewals: int


@dataclass
class Hold:
    """A row of `holds`."""

    id: str
    card: str
    book: str


@dataclass
class Library:
    """All rows of a database. The first member is the one who writes to the desk."""

    members: list[Member] = field(default_factory=list)
    books: list[Book] = field(default_factory=list)
    loans: list[Loan] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)

    @property
    def member(self) -> Member:
        """The member who writes to the desk."""
        return self.members[0]

    def own_loans(self) -> list[Loan]:
        """Return the loans of the member."""
        return [loan for loan in self.loans if loan.card == self.member.card]

    def own_holds(self) -> list[Hold]:
        """Return the holds of the member."""
        return [hold for hold in self.holds if hold.card == self.member.card]

    def waiting(self, book: str) -> int:
        """Return the number of members who have a hold on `book`."""
        return sum(hold.book == book for hold in self.holds)

    def book(self, book_id: str) -> Book:
        """Return the book with this id."""
        return next(book for book in self.books if book.id == book_id)

    def rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return the rows for `open_database`."""
        return {
            name: [tuple(vars(row).values()) for row in table] for name, table in vars(self).items()
        }


ReferenceCall = tuple[str, dict[str, str]]

TOO_LATE = "2031-02-24"
"""A loan that was due before this day is more than 14 days overdue."""

A_YEAR_AGO = "2030-03-10"
_RENEWALS = {"standard": 2, "plus": 4}
_HOLDS = {"standard": 3, "plus": 5}


@dataclass(frozen=True)
class Settled:
    """A request, its reference calls and reply. The reply must contain each of `told`."""

    kind: str
    title: str
    actions: list[ReferenceCall]
    reply: str
    told: list[str]


def _forbidden(kind: str, title: str, actions: list[ReferenceCall], code: str) -> Settled:
    return Settled(kind, title, actions, f"I cannot do that, because of rule {code}.", [code])


def _the_one(broken: Mapping[str, bool]) -> str | None:
    """Return the code of the broken rule, or None. Raise `LookupError` if several rules are broken,
    because the reply must name exactly one.
    """
    codes = [code for code, is_broken in broken.items() if is_broken]
    if len(codes) > 1:
        raise LookupError(codes)
    return codes[0] if codes else None


def renew(library: Library, loan: Loan) -> Settled:
    """Renew a loan of the member."""
    title, member = library.book(loan.book).title, library.member
    search = ("search_books", {"title": title})
    code = _the_one(
        {
            "R1": loan.renewals >= _RENEWALS[member.tier],
            "R2": library.waiting(loan.book) > 0,
            "R3": loan.due < TOO_LATE,
            "R4": member.owed > 1000,
        }
    )
    if code:
        return _forbidden("renew", title, [search], code)
    loan.due, loan.renewals = RENEWED_UNTIL, loan.renewals + 1
    actions = [search, ("renew_loan", {"loan_id": loan.id})]
    reply = f"{title} is renewed until {RENEWED_UNTIL}."
    return Settled("renew", title, actions, reply, [RENEWED_UNTIL])


def hold(library: Library, book: Book) -> Settled:
    """Place a hold on a book that the member has not borrowed and does not wait for."""
    member = library.member
    search = ("search_books", {"title": book.title})
    code = _the_one(
        {
            "H1": len(library.own_holds()) >= _HOLDS[member.tier],
            "H2": book.on_shelf > 0,
            "H3": book.kind == "reference",
            "R4": member.owed > 1000,
        }
    )
    if code:
        return _forbidden("hold", book.title, [search], code)
    library.holds.append(Hold("new", member.card, book.id))
    place = str(library.waiting(book.id))
    actions = [search, ("place_hold", {"card": member.card, "book_id": book.id})]
    reply = f"Your place in the queue for {book.title} is {place}."
    return Settled("hold", book.title, actions, reply, [place])


def cancel(library: Library, hold: Hold) -> Settled:
    """Cancel a hold of the member."""
    title = library.book(hold.book).title
    library.holds.remove(hold)
    actions = [("cancel_hold", {"hold_id": hold.id})]
    return Settled("cancel", title, actions, f"Your hold on {title} is cancelled.", [])


def waive(library: Library, _: None) -> Settled:
    """Waive the member's fees, which must not be 0."""
    member = library.member
    code = _the_one({"F1": member.owed > 500, "F2": member.waived_on > A_YEAR_AGO})
    if code:
        return _forbidden("waive", "", [], code)
    amount = money(member.owed)
    member.owed, member.waived_on = 0, TODAY
    actions = [("waive_fees", {"card": member.card})]
    return Settled("waive", "", actions, f"I have waived {amount}.", [amount])


def due(library: Library, loan: Loan) -> Settled:
    """Tell when a loan is due."""
    title = library.book(loan.book).title
    return Settled("due", title, [], f"{title} is due on {loan.due}.", [loan.due])


def owed(library: Library, _: None) -> Settled:
    """Tell what the member owes."""
    amount = money(library.member.owed)
    return Settled("owed", "", [], f"You owe {amount}.", [amount])


def transfer(library: Library, kind: str, title: str, topic: str) -> Settled:
    """Settle a request by handing the chat to a person."""
    arguments = {"card": library.member.card, "topic": topic}
    return Settled(kind, title, [("transfer_to_person", arguments)], "", [])


def choices(library: Library, kind: str) -> list[Any]:
    """Return the objects that a request of this kind may refer to, or []."""
    if kind in ("renew", "due", "lost"):
        # A loan that was just renewed is not renewed again.
        return [loan for loan in library.own_loans() if loan.due != RENEWED_UNTIL]
    if kind == "cancel":
        return [hold for hold in library.own_holds() if hold.id != "new"]
    if kind == "hold":
        own_books = {loan.book for loan in library.own_loans()}
        own_books |= {hold.book for hold in library.own_holds()}
        return [book for book in library.books if book.id not in own_books]
    return [None] if kind != "waive" or library.member.owed else []


SETTLE: Mapping[str, Callable[[Library, Any], Settled]] = {
    "renew": renew,
    "hold": hold,
    "cancel": cancel,
    "waive": waive,
    "due": due,
    "owed": owed,
    "lost": lambda library, loan: transfer(
        library, "lost", library.book(loan.book).title, "lost_item"
    ),
    "complaint": lambda library, _: transfer(library, "complaint", "", "complaint"),
}
