"""`Library`: the database rows of one generated task. They change when a request is settled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
