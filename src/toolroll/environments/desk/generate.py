"""Generated tasks. In each task, a member of a new library makes one or two requests.

The outcome of a task, such as a renewal that rule R2 forbids, is drawn first, so that no outcome is
rare. The values in a library are never close to a limit in the rules: for example, a generated loan
is at most 9 or at least 18 days overdue.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any

from toolroll.environments.desk import words
from toolroll.environments.desk.rules import (
    SETTLE,
    Book,
    Hold,
    Library,
    Loan,
    Member,
    Settled,
    choices,
    transfer,
)

_OUTCOMES: dict[tuple[str, str | None], int] = {
    ("renew", None): 6,
    ("renew", "R1"): 3,
    ("renew", "R2"): 3,
    ("renew", "R3"): 3,
    ("renew", "R4"): 2,
    ("hold", None): 6,
    ("hold", "H1"): 3,
    ("hold", "H2"): 3,
    ("hold", "H3"): 3,
    ("hold", "R4"): 2,
    ("cancel", None): 4,
    ("waive", None): 3,
    ("waive", "F1"): 3,
    ("waive", "F2"): 3,
    ("due", None): 3,
    ("owed", None): 2,
    ("lost", None): 2,
    ("complaint", None): 2,
    ("blocked", None): 2,
    ("stranger", "A1"): 4,
}
"""The weight of each kind of request and of each rule that forbids it. `blocked` and `stranger` are
requests of any kind by a member with a blocked card, or with the wrong postcode.
"""

_TWO_REQUESTS = 0.35
_SECOND = {
    "renew": ("hold", "cancel", "waive", "due", "owed"),
    "hold": ("renew", "waive", "due", "owed"),
    "cancel": ("renew", "waive", "due", "owed"),
    "waive": ("renew", "hold", "cancel", "due"),
    "due": ("renew", "hold", "cancel", "waive", "owed"),
    "owed": ("renew", "hold", "cancel", "waive", "due"),
}
"""Maps each kind of request to the kinds that may follow it. A second request depends on nothing
that the first one changed, so one look at the account is enough.
"""


def generate(count: int, *, held_out: bool) -> list[dict[str, Any]]:
    """Return `count` tasks. Every call returns the same tasks. The titles and cards of held-out
    tasks do not occur in other tasks.
    """
    name = "held-out" if held_out else "train"
    return [_task(f"{name}-{index:05d}", held_out=held_out) for index in range(count)]


def _task(name: str, *, held_out: bool) -> dict[str, Any]:
    """Draw an outcome. Then draw libraries until one of them has this outcome."""
    rng = random.Random(f"desk/{name}")
    [goal] = rng.choices(list(_OUTCOMES), list(_OUTCOMES.values()))
    while True:
        library = _library(rng, held_out=held_out, blocked=goal[0] == "blocked")
        rows, postcode = library.rows(), library.member.postcode
        settled = _settle(rng, library, goal)
        if settled is None:
            continue
        lines = [_words(rng, request) for request in settled]
        if goal[0] == "stranger":
            wrong = _digits(rng)
            if wrong == postcode:
                continue
            postcode = wrong
        return {
            "id": name,
            "card": library.member.card,
            "postcode": postcode,
            "opening": lines[0],
            "more": lines[1:],
            "actions": [action for request in settled for action in request.actions],
            "told": [text for request in settled for text in request.told],
            "requests": [vars(request) for request in settled],
            "rows": rows,
        }


def _settle(
    rng: random.Random, library: Library, goal: tuple[str, str | None]
) -> list[Settled] | None:
    """Return the requests with their reference actions. Return None if `library` does not lead to
    the outcome `goal`.
    """
    kind, code = goal
    if kind in ("blocked", "stranger"):
        requested = rng.choice(("renew", "hold", "waive", "cancel", "due", "owed"))
        objects = choices(library, requested)
        if not objects:
            return None
        title = _title(library, rng.choice(objects))
        if kind == "blocked":
            return [transfer(library, requested, title, "blocked_card")]
        reply = "I cannot help you, because of rule A1."
        return [Settled(requested, title, [], reply, ["A1"])]
    first = _one(rng, library, kind)
    if first is None or code != _code(first):
        return None
    second = None
    if kind in _SECOND and rng.random() < _TWO_REQUESTS:
        second = _one(rng, library, rng.choice(_SECOND[kind]))
        if second is None or (second.title and second.title == first.title):
            return None
    return [first, second] if second else [first]


def _one(rng: random.Random, library: Library, kind: str) -> Settled | None:
    objects = choices(library, kind)
    try:
        return SETTLE[kind](library, rng.choice(objects)) if objects else None
    except LookupError:  # several rules forbid the request
        return None


def _code(settled: Settled) -> str | None:
    return (
        settled.told[0] if settled.reply.endswith("rule " + "".join(settled.told) + ".") else None
    )


def _title(library: Library, record: Book | Loan | Hold | None) -> str:
    if record is None:
        return ""
    return record.title if isinstance(record, Book) else library.book(record.book).title


def _words(rng: random.Random, request: Settled) -> str:
    return rng.choice(words.REQUESTS[request.kind]).format(title=request.title)


# --- the library ----------------------------------------------------------------------------------


def _library(rng: random.Random, *, held_out: bool, blocked: bool) -> Library:
    library = Library()
    tier = "plus" if rng.random() < 0.4 else "standard"
    status = "blocked" if blocked else "active"
    cards = _cards(rng, held_out=held_out)
    for number, card in enumerate(cards):
        is_first = number == 0
        name = f"{rng.choice(words.FIRST_NAMES)} {rng.choice(words.LAST_NAMES)}"
        library.members.append(
            Member(
                card,
                name,
                _digits(rng),
                tier if is_first else "standard",
                status if is_first else "active",
                _owed(rng) if is_first else 0,
                _waived_on(rng) if is_first else "",
            )
        )
    _fill(rng, library, held_out=held_out)
    return library


def _fill(rng: random.Random, library: Library, *, held_out: bool) -> None:
    """Add books, and loans and holds on them."""
    plus = library.member.tier == "plus"
    loans, holds = rng.randint(1, 3), rng.choice((0, 1, 2, 3, 5, 5) if plus else (0, 1, 3))
    ids = _ids(rng)
    titles = _titles(rng, loans + holds + 2, held_out=held_out)
    for position, title in enumerate(titles):
        lent, on_hold = position < loans, loans <= position < loans + holds
        book = Book(f"B{next(ids)}", title, rng.choice(words.LAST_NAMES), "lending", 0)
        library.books.append(book)
        if lent:
            renewals = rng.randint(0, 4 if plus else 2)
            library.loans.append(
                Loan(f"N{next(ids)}", library.member.card, book.id, _due(rng), renewals)
            )
        elif on_hold:
            library.holds.append(Hold(f"H{next(ids)}", library.member.card, book.id))
        else:
            book.kind = "reference" if rng.random() < 0.25 else "lending"
            on_shelf = book.kind == "lending" and rng.random() < 0.35
            book.on_shelf = rng.randint(1, 3) if on_shelf else 0
        hold_count = rng.randint(0, 3) if not lent else rng.randint(0, 2) * (rng.random() < 0.3)
        for member in library.members[1 : 1 + hold_count * (book.on_shelf == 0)]:
            library.holds.append(Hold(f"H{next(ids)}", member.card, book.id))
    library.loans.sort(key=lambda loan: loan.id)
    library.holds.sort(key=lambda hold: hold.id)


def _cards(rng: random.Random, *, held_out: bool) -> list[str]:
    cards: set[str] = set()
    while len(cards) < 4:
        number = rng.randint(2000, 9999)
        if (number % 7 == 0) == held_out:
            cards.add(f"L-{number}")
    shuffled = sorted(cards)
    rng.shuffle(shuffled)
    return shuffled


def _titles(rng: random.Random, count: int, *, held_out: bool) -> list[str]:
    """Return titles. No two of them share a word."""
    titles: list[str] = []
    used: set[int] = set()
    for adjective in rng.sample(range(len(words.ADJECTIVES)), count):
        noun = rng.randrange(len(words.NOUNS))
        while noun in used or ((adjective + 3 * noun) % 10 == 0) != held_out:
            noun = rng.randrange(len(words.NOUNS))
        used.add(noun)
        titles.append(f"The {words.ADJECTIVES[adjective]} {words.NOUNS[noun]}")
    return titles


def _ids(rng: random.Random) -> Iterator[str]:
    """Yield numbers for the ids of books, loans and holds. Each number is used once."""
    return iter([str(number) for number in rng.sample(range(20, 98), 60)])


def _digits(rng: random.Random) -> str:
    return str(rng.randint(5000, 9999))


def _owed(rng: random.Random) -> int:
    low, high = rng.choices([(0, 0), (1, 10), (11, 19), (21, 49)], [4, 4, 2, 3])[0]
    return 50 * rng.randint(low, high)


def _waived_on(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return ""
    first, days = rng.choice(((date(2027, 1, 1), 1000), (date(2030, 5, 1), 300)))
    return str(first + timedelta(days=rng.randrange(days)))


def _due(rng: random.Random) -> str:
    first, days = (date(2031, 1, 2), 50) if rng.random() < 0.25 else (date(2031, 3, 1), 30)
    return str(first + timedelta(days=rng.randrange(days)))
