"""Drills: exercises that the network learns before it imitates episodes. In each drill, the
network looks up rows, compares pairs of numbers, and judges dates.

An episode needs a few of these skills among hundreds of tokens. A drill practices them a dozen
times in a hundred tokens, so a small network learns them in minutes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from typing import Any

import numpy as np
from examples.learn_desk import teacher
from examples.learn_desk.batches import Sample

from toolroll import Task

_Piece = tuple[str, bool]
"""A text, and whether its tokens are trained."""


def drill(tokenizer: Any, task: Task, rng: random.Random) -> Sample:
    """Return a sample: the rows of an account and of two other books, then exercises about them.
    Only the answers are trained.
    """
    member = teacher.account(task.data)
    rows = [*member["loans"], *member["holds"]]
    titles = {book[1] for book in task.data["rows"]["books"]} - {row["title"] for row in rows}
    rows += [teacher.found_book(task.data, title) for title in rng.sample(sorted(titles), 2)]
    pieces: list[_Piece] = [(json.dumps(rows) + "\n", False)]
    for row in rng.sample(rows * 2, len(rows) * 2):
        pieces += _lookup(row)
    for _ in range(8):
        pieces += _comparison(rng) + _judgment(rng)
    return _sample(tokenizer, pieces)


def _lookup(row: teacher.Facts) -> list[_Piece]:
    """Return an exercise: the first words of a row's title ("The" and an adjective). The answer is
    the rest of the row.
    """
    quoted = teacher.quote(row, *row)
    asked = " ".join(quoted.split(" ")[:3])
    return [(asked, False), (quoted.removeprefix(asked) + "\n", True)]


def _comparison(rng: random.Random) -> list[_Piece]:
    given = str(rng.randint(5000, 9999))
    other = given if rng.random() < 0.5 else str(rng.randint(5000, 9999))
    if rng.random() < 0.2:  # only one digit differs
        at = rng.randrange(4)
        other = given[:at] + str(rng.randint(0, 9)) + given[at + 1 :]
    return _verdict(teacher.identity(given, {"postcode": other}))


def _judgment(rng: random.Random) -> list[_Piece]:
    late = rng.random() < 0.5
    due = (
        date(2031, 1, 2) + timedelta(rng.randrange(50))
        if late
        else date(2031, 3, rng.randint(1, 30))
    )
    return _verdict(f"{teacher.quote({'due': str(due)}, 'due')} {'R3' if late else 'ok'}")


def _verdict(text: str) -> list[_Piece]:
    """Return an exercise: `text` without its last word. The answer is this word."""
    end = text.rindex(" ")
    return [(text[:end], False), (text[end:] + "\n", True)]


def _sample(tokenizer: Any, pieces: Sequence[_Piece]) -> Sample:
    text = "".join(part for part, _ in pieces)
    ends = np.cumsum([len(part) for part, _ in pieces])
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A token belongs to the piece in which it ends.
    at = np.searchsorted(ends, [end for _, end in encoded["offset_mapping"]])
    mask = np.array([pieces[piece][1] for piece in at], np.int32)
    ids = np.array(encoded["input_ids"], np.int32)
    return Sample(ids, mask, np.zeros(len(ids), np.float32))


def drill_batches(
    tokenizer: Any, tasks: Sequence[Task], size: int, rng: random.Random
) -> Iterator[list[Sample]]:
    """Yield batches of `size` drills forever."""
    while True:
        yield [drill(tokenizer, rng.choice(tasks), rng) for _ in range(size)]
