"""Exercises before the first episode: copy, look up, compare.

An episode has one comparison and a few quotes among hundreds of tokens. A drill has many, so that a
small network learns them in minutes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from examples.learn_desk import teacher
from examples.learn_desk.batches import Sample

from toolroll.rollout.types import Task

_Piece = tuple[str, bool]
"""A text, and whether its tokens are trained."""


def exercises(tokenizer: Any, task: Task, rng: random.Random) -> Sample:
    """Return an account with questions about it, each with its answer."""
    member = teacher.account(task.data)
    book = teacher.found_book(task.data, rng.choice(task.data["rows"]["books"])[1])
    pieces: list[_Piece] = [(f"{json.dumps(member)}\n{json.dumps([book])}\n", False)]
    lookups = [*_lookups(member), *_of_book(book)]
    found = [*lookups, *lookups, *[list(_comparison(rng)) for _ in range(4)]]
    rng.shuffle(found)
    pieces += [piece for one in found for piece in one]
    text = "".join(part for part, _ in pieces)
    starts = np.cumsum([0] + [len(part) for part, _ in pieces])
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A token belongs to the piece in which it begins.
    at = [np.searchsorted(starts, begin, "right") - 1 for begin, _ in encoded["offset_mapping"]]
    mask = np.array([pieces[piece][1] for piece in at], np.uint8)
    return _sample(np.array(encoded["input_ids"], np.int32), mask)


def _lookups(member: teacher.Facts) -> Iterator[list[_Piece]]:
    for row in member["loans"]:
        quoted = teacher.loan(member, row["title"])
        yield [(f"renew {row['title']}\n", False), (f"{quoted}\n", True)]
    for row in member["holds"]:
        quoted = teacher.hold(member, row["title"])
        yield [(f"cancel {row['title']}\n", False), (f"{quoted}\n", True)]
    for name in ("card", "owed", "waived_on", "tier", "status"):
        text = teacher.quote(member, name)
        start = text.index(":") + 3
        yield [(text[:start], False), (f"{text[start:]}\n", True)]


def _of_book(book: teacher.Facts) -> Iterator[list[_Piece]]:
    quoted = teacher.quote(book, "title", "author", "book_id", "kind")
    yield [(f"hold {book['title']}\n", False), (f"{quoted}\n", True)]
    for name in ("on_shelf", "waiting"):
        text = teacher.quote(book, name)
        start = text.index(":") + 2
        yield [(text[:start], False), (f"{text[start:]}\n", True)]


def _comparison(rng: random.Random) -> Iterator[_Piece]:
    given = str(rng.randint(5000, 9999))
    other = given if rng.random() < 0.5 else str(rng.randint(5000, 9999))
    if rng.random() < 0.2:  # only one digit differs
        at = rng.randrange(4)
        other = given[:at] + str(rng.randint(0, 9)) + given[at + 1 :]
    text = teacher.identity(given, {"postcode": other})
    end = text.rindex(" ")
    yield text[:end], False
    yield text[end:] + "\n", True


def _sample(ids: Any, mask: Any) -> Sample:
    return Sample(ids, mask, np.zeros(len(ids), np.float32))


def drill_batches(
    tokenizer: Any, tasks: Sequence[Task], size: int, rng: random.Random
) -> Iterator[list[Sample]]:
    """Return batches of exercises forever."""
    while True:
        yield [exercises(tokenizer, rng.choice(tasks), rng) for _ in range(size)]
