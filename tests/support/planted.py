"""Faults for clean training rows. Each changes the rows in place or returns others."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
from support.audited import Row
from support.qwen import tokenizer_for, trl_template

from toolroll.evaluation.audit.row import runs

Fault = Callable[[list[Row]], Any]
Spans = list[tuple[int, int]]
COLUMNS = ("input_ids", "loss_mask", "logprobs")


def plant(fault: Fault, rows: Sequence[Row]) -> list[Row]:
    """Copies of the clean `rows` with `fault`."""
    changed = deepcopy(list(rows))
    replaced = fault(changed)
    return changed if replaced is None else replaced


def spans(row: Row) -> Spans:
    return runs(np.array(row["loss_mask"]) != 0)


def first(change: Callable[[Row, Spans], Any]) -> Fault:
    """The fault of the first row alone. `change` gets the spans of its turns too."""
    return lambda rows: change(rows[0], spans(rows[0]))


def mask(row: Row, start: int, stop: int, bit: int) -> None:
    row["loss_mask"][start:stop] = [bit] * (stop - start)


def replace(row: Row, start: int, stop: int, ids: Sequence[int], bit: int) -> None:
    """Replace the tokens [start, stop) with `ids`."""
    row["input_ids"][start:stop] = ids
    row["loss_mask"][start:stop] = [bit] * len(ids)
    row["logprobs"][start:stop] = [-0.25 if bit else None] * len(ids)


def cut(row: Row, start: int, stop: int | None) -> None:
    for name in COLUMNS:
        del row[name][start:stop]


def repeat(row: Row, start: int, stop: int) -> None:
    for name in COLUMNS:
        row[name][stop:stop] = row[name][start:stop]


def mask_edges(start: int, stop: int, bit: int, *, edge: int = 1) -> Fault:
    """Set the mask from `start` to `stop` tokens after the end of turns (their start: `edge` 0)."""

    def change(row: Row, turns: Spans) -> None:
        for span in turns:
            place, length = span[edge], len(row["input_ids"])
            mask(row, max(0, place + start), min(place + stop, length), bit)

    return first(change)


def rewrite(where: str, change: Callable[[int], list[int]]) -> Fault:
    """Replace an id in the middle of the "prompt", of a "turn" or of a "result"."""

    def rewritten(row: Row, turns: Spans) -> None:
        (start, stop), turn, *_ = turns
        places = {"prompt": (0, start), "turn": turn, "result": (stop, turn[0])}
        ids = row["input_ids"][slice(*places[where])]
        middle = len(ids) // 2
        ids[middle : middle + 1] = change(ids[middle])
        replace(row, *places[where], ids, int(where == "turn"))

    return first(rewritten)


def encoded_again(row: Row, turns: Spans) -> None:
    """A turn has the same text in other tokens: one for each letter of one word."""
    encode, ids = tokenizer().encode, row["input_ids"]
    texts = {place: tokenizer().decode(ids[place]) for place in range(*turns[1])}
    word = next(place for place, text in texts.items() if text.isalpha() and len(text) > 1)
    letters = [index for letter in texts[word] for index in encode(letter)]
    replace(row, word, word + 1, letters, 1)


@cache
def tokenizer() -> Any:
    return tokenizer_for(trl_template("qwen2_5"))


def swapped_turns(row: Row, turns: Spans) -> None:
    (start, stop), (second, end) = turns[1:3]
    for name in COLUMNS:
        tokens = row[name]
        tokens[start:end] = tokens[second:end] + tokens[stop:second] + tokens[start:stop]


def turn_of_another_row(rows: list[Row]) -> None:
    turn, other = (slice(*spans(row)[1]) for row in rows[:2])
    for name in COLUMNS:
        rows[0][name][turn] = rows[1][name][other]


def merged_rows(rows: list[Row]) -> list[Row]:
    for name in COLUMNS:
        rows[0][name] += rows[1][name]
    return [rows[0], *rows[2:]]


def trained_again(rows: list[Row]) -> list[Row]:
    """A second row has the first turns of a row again, as the rows of single turns have."""
    again = deepcopy(rows[0])
    cut(again, spans(again)[1][1], None)
    return [*rows, again]


def append_result(bit: int) -> Fault:
    def change(row: Row, turns: Spans) -> None:
        length, ids = len(row["input_ids"]), row["input_ids"][turns[0][1] + 4 : turns[1][0] - 3]
        replace(row, length, length, ids, bit)

    return first(change)


def change_logprobs(change: Callable[[list[Any]], list[Any]]) -> Fault:
    """Change the logprobs of the second turn."""

    def changed(row: Row, turns: Spans) -> None:
        turn = slice(*turns[1])
        row["logprobs"][turn] = change(row["logprobs"][turn])

    return first(changed)


def other_message(role: str, **change: Any) -> Fault:
    """The messages of a row change, not its tokens."""

    def changed(row: Row, turns: Spans) -> None:
        next(one for one in row["messages"] if one["role"] == role).update(change)

    return first(changed)


CHANGES: dict[str, Callable[[int], list[int]]] = {
    "has another token": lambda index: [index + 1],
    "lacks a token": lambda index: [],
}
PLANTED: dict[str, Fault] = {
    "the mask is shifted right": first(
        lambda row, turns: row.update(loss_mask=[0, *row["loss_mask"][:-1]])
    ),
    "the mask is shifted left": first(
        lambda row, turns: row.update(loss_mask=[*row["loss_mask"][1:], 0])
    ),
    "the stop tokens are not trained": mask_edges(-1, 0, 0),
    "the token after each stop token is trained": mask_edges(0, 1, 1),
    "the first tokens are not trained": mask_edges(0, 1, 0, edge=0),
    "the end of each prompt is trained": mask_edges(-1, 0, 1, edge=0),
    "half of a turn is not trained": first(
        lambda row, turns: mask(row, turns[1][0], sum(turns[1]) // 2, 0)
    ),
    "a token of a turn is not trained": first(
        lambda row, turns: mask(row, turns[1][0] + 1, turns[1][0] + 2, 0)
    ),
    "a tool result is trained": first(lambda row, turns: mask(row, turns[0][1], turns[1][0], 1)),
    "the whole response is trained": first(
        lambda row, turns: mask(row, turns[0][0], turns[-1][1], 1)
    ),
    "everything is trained": first(lambda row, turns: mask(row, 0, len(row["input_ids"]), 1)),
    "a turn is not trained": first(lambda row, turns: mask(row, *turns[1], 0)),
    "a turn is encoded again": first(encoded_again),
    **{
        f"{what} {how}": rewrite(where, change)
        for what, where in (("a turn", "turn"), ("a result", "result"), ("the prompt", "prompt"))
        for how, change in CHANGES.items()
    },
    "the first token is missing": first(lambda row, turns: cut(row, 0, 1)),
    "padding is at the start": first(lambda row, turns: replace(row, 0, 0, [0] * 8, 0)),
    "a part of an earlier turn is dropped": first(  # as a template drops thoughts
        lambda row, turns: cut(row, turns[0][0], sum(turns[0]) // 2)
    ),
    "a turn is there twice": first(lambda row, turns: repeat(row, *turns[1])),
    "a turn and its result are there twice": first(
        lambda row, turns: repeat(row, turns[1][0], turns[2][0])
    ),
    "two turns are swapped": first(swapped_turns),
    "a turn is that of another row": turn_of_another_row,
    "two rows are merged": merged_rows,
    "the row is truncated in a turn": first(lambda row, turns: cut(row, sum(turns[2]) // 2, None)),
    "the row is truncated at its start": first(lambda row, turns: cut(row, 0, turns[0][0] // 2)),
    "a row is there twice": lambda rows: [*rows, deepcopy(rows[0])],
    "turns are trained again in another row": trained_again,
    "a result is missing": first(lambda row, turns: cut(row, turns[0][1], turns[1][0])),
    "a result is appended": append_result(0),
    "a result is appended and trained": append_result(1),
    "the logprobs are shifted": change_logprobs(lambda own: [*own[1:], own[0]]),
    "the logprobs are zero": change_logprobs(lambda own: [0.0] * len(own)),
    "the logprobs are positive": change_logprobs(lambda own: [-value for value in own]),
    "the logprobs have another temperature": change_logprobs(
        lambda own: [0.7 * value for value in own]
    ),
    "the logprobs were computed again": change_logprobs(
        lambda own: [value - 0.001 for value in own]
    ),
    "a logprob is missing": change_logprobs(lambda own: [None, *own[1:]]),
    "the message of a result is another one": other_message("tool", content="Nothing."),
    "the message of a turn is another one": other_message("assistant", content="I refuse."),
    "the messages lack the tools": first(lambda row, turns: row.update(tools=[])),
}
