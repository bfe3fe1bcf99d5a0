"""Faults for clean training rows. Each changes the rows in place or returns others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
from support.audited import Row
from support.qwen import tokenizer_for, trl_template

from toolroll.evaluation.audit.row import runs

Fault = Callable[[list[Row]], Any]


def plant(fault: Fault, rows: Sequence[Row]) -> list[Row]:
    """Copies of the clean `rows` with `fault`."""
    changed = deepcopy(list(rows))
    replaced = fault(changed)
    return changed if replaced is None else replaced


def spans(row: Row) -> list[tuple[int, int]]:
    return runs(np.array(row["loss_mask"]) != 0)


def mask(row: Row, start: int, stop: int, bit: int) -> None:
    row["loss_mask"][start:stop] = [bit] * (stop - start)


def replace(row: Row, start: int, stop: int, ids: Sequence[int], bit: int) -> None:
    """Replace the tokens [start, stop) with `ids`."""
    row["input_ids"][start:stop] = ids
    row["loss_mask"][start:stop] = [bit] * len(ids)
    row["logprobs"][start:stop] = [-0.25 if bit else None] * len(ids)


def cut(row: Row, start: int, stop: int) -> None:
    for name in ("input_ids", "loss_mask", "logprobs"):
        del row[name][start:stop]


def part(row: Row, start: int, stop: int) -> dict[str, list[Any]]:
    return {name: row[name][start:stop] for name in ("input_ids", "loss_mask", "logprobs")}


def put(row: Row, at: int, tokens: dict[str, list[Any]]) -> None:
    for name, values in tokens.items():
        row[name][at:at] = values


def shift_mask(by: int) -> Fault:
    def fault(rows: list[Row]) -> None:
        bits = rows[0]["loss_mask"]
        rows[0]["loss_mask"] = [0, *bits[:-1]] if by > 0 else [*bits[1:], 0]

    return fault


def mask_edges(
    start: int, stop: int, bit: int, *, turns: slice = slice(None), edge: int = 1
) -> Fault:
    """Set the mask from `start` to `stop` tokens after the end of turns (their start: `edge` 0)."""

    def fault(rows: list[Row]) -> None:
        for span in spans(rows[0])[turns]:
            place, length = span[edge], len(rows[0]["input_ids"])
            mask(rows[0], max(0, place + start), min(place + stop, length), bit)

    return fault


def mask_half(rows: list[Row]) -> None:
    start, stop = spans(rows[0])[1]
    mask(rows[0], start, (start + stop) // 2, 0)


def mask_result(rows: list[Row]) -> None:
    """A tool result is trained."""
    first, second, *_ = spans(rows[0])
    mask(rows[0], first[1], second[0], 1)


def rewrite(where: str, change: Callable[[int], list[int]]) -> Fault:
    """Replace an id in the middle of the "prompt", of a "turn" or of a "result"."""

    def fault(rows: list[Row]) -> None:
        first, second, *_ = spans(rows[0])
        places = {"prompt": (0, first[0]), "turn": second, "result": (first[1], second[0])}
        ids = rows[0]["input_ids"][slice(*places[where])]
        middle = len(ids) // 2
        ids[middle : middle + 1] = change(ids[middle])
        replace(rows[0], *places[where], ids, int(where == "turn"))

    return fault


def encoded_again(rows: list[Row]) -> None:
    """A turn has the same text in other tokens: one for each letter of one word."""
    start, stop = spans(rows[0])[1]
    encode, ids = tokenizer().encode, rows[0]["input_ids"]
    texts = {at: tokenizer().decode(ids[at]) for at in range(start, stop)}
    at = next(at for at, text in texts.items() if text.isalpha() and len(text) > 1)
    letters = [index for letter in texts[at] for index in encode(letter)]
    replace(rows[0], at, at + 1, letters, 1)


@cache
def tokenizer() -> Any:
    return tokenizer_for(trl_template("qwen2_5"))


def put_first(ids: Callable[[Row], list[int]]) -> Fault:
    """Tokens that are not sampled stand before a row."""

    def fault(rows: list[Row]) -> None:
        new = ids(rows[0])
        put(
            rows[0],
            0,
            {"input_ids": new, "loss_mask": [0] * len(new), "logprobs": [None] * len(new)},
        )

    return fault


def dropped_history(rows: list[Row]) -> None:
    """The first half of the first turn is dropped, as a template drops thoughts."""
    start, stop = spans(rows[0])[0]
    cut(rows[0], start, (start + stop) // 2)


def doubled_turn(rows: list[Row]) -> None:
    start, stop = spans(rows[0])[1]
    put(rows[0], stop, part(rows[0], start, stop))


def doubled_exchange(rows: list[Row]) -> None:
    (start, _), (stop, _) = spans(rows[0])[1:3]
    put(rows[0], stop, part(rows[0], start, stop))


def swapped_turns(rows: list[Row]) -> None:
    row = rows[0]
    (first, first_end), (second, second_end) = spans(row)[1:3]
    parts = part(row, first, first_end), part(row, second, second_end)
    cut(row, second, second_end)
    put(row, second, parts[0])
    cut(row, first, first_end)
    put(row, first, parts[1])


def turn_of_another_row(rows: list[Row]) -> None:
    start, stop = spans(rows[0])[1]
    cut(rows[0], start, stop)
    put(rows[0], start, part(rows[1], *spans(rows[1])[1]))


def merged_rows(rows: list[Row]) -> list[Row]:
    put(rows[0], len(rows[0]["input_ids"]), part(rows[1], 0, len(rows[1]["input_ids"])))
    return [rows[0], *rows[2:]]


def truncated(rows: list[Row]) -> None:
    start, stop = spans(rows[0])[2]
    cut(rows[0], (start + stop) // 2, len(rows[0]["input_ids"]))


def trained_again(rows: list[Row]) -> list[Row]:
    """A second row has the first turns of a row again, as the rows of single turns have."""
    again = deepcopy(rows[0])
    cut(again, spans(again)[1][1], len(again["input_ids"]))
    return [*rows, again]


def lost_delta(rows: list[Row]) -> None:
    first, second, *_ = spans(rows[0])
    cut(rows[0], first[1], second[0])


def appended(bit: int) -> Fault:
    def fault(rows: list[Row]) -> None:
        row = rows[0]
        first, second, *_ = spans(row)
        ids = row["input_ids"][first[1] + 4 : second[0] - 3]
        replace(row, len(row["input_ids"]), len(row["input_ids"]), ids, bit)

    return fault


def change_logprobs(change: Callable[[list[Any], list[Any]], list[Any]]) -> Fault:
    """Change the logprobs of the second turn. `change` gets those of the first one too."""

    def fault(rows: list[Row]) -> None:
        first, second, *_ = (slice(*span) for span in spans(rows[0]))
        values = rows[0]["logprobs"]
        values[second] = change(values[second], values[first])

    return fault


def like(values: list[Any], others: list[Any]) -> list[Any]:
    return [others[at % len(others)] for at in range(len(values))]


def logprobs_of_another_row(rows: list[Row]) -> None:
    values, first, second = rows[0]["logprobs"], *(slice(*spans(row)[1]) for row in rows[:2])
    values[first] = like(values[first], rows[1]["logprobs"][second])


def copied_logprobs(rows: list[Row]) -> None:
    """The longer of two turns starts with the logprobs of the other one."""
    first, second, *_ = spans(rows[0])
    values, size = rows[0]["logprobs"], min(first[1] - first[0], second[1] - second[0])
    values[second[0] : second[0] + size] = values[first[0] : first[0] + size]


def other_message(role: str, **change: Any) -> Fault:
    """The messages of a row change, not its tokens."""

    def fault(rows: list[Row]) -> None:
        at = next(n for n, one in enumerate(rows[0]["messages"]) if one["role"] == role)
        rows[0]["messages"][at] |= change

    return fault


CHANGES: dict[str, Callable[[int], list[int]]] = {
    "has another token": lambda index: [index + 1],
    "has a token twice": lambda index: [index, index],
    "lacks a token": lambda index: [],
}
PLANTED: dict[str, Fault] = {
    "the mask is shifted right": shift_mask(1),
    "the mask is shifted left": shift_mask(-1),
    "the stop tokens are not trained": mask_edges(-1, 0, 0),
    "the last stop token is not trained": mask_edges(-1, 0, 0, turns=slice(-1, None)),
    "the token after each stop token is trained": mask_edges(0, 1, 1),
    "the first tokens are not trained": mask_edges(0, 1, 0, edge=0),
    "the end of each prompt is trained": mask_edges(-1, 0, 1, edge=0),
    "half of a turn is not trained": mask_half,
    "a tool result is trained": mask_result,
    "the whole response is trained": lambda rows: mask(
        rows[0], spans(rows[0])[0][0], spans(rows[0])[-1][1], 1
    ),
    "everything is trained": lambda rows: mask(rows[0], 0, len(rows[0]["input_ids"]), 1),
    "a turn is not trained": lambda rows: mask(rows[0], *spans(rows[0])[1], 0),
    "a turn is encoded again": encoded_again,
    **{
        f"{what} {how}": rewrite(where, change)
        for what, where in (("a turn", "turn"), ("a result", "result"), ("the prompt", "prompt"))
        for how, change in CHANGES.items()
    },
    "the first token is there twice": put_first(lambda row: row["input_ids"][:1]),
    "the first token is missing": lambda rows: cut(rows[0], 0, 1),
    "padding is at the start": put_first(lambda row: [0] * 8),
    "a part of an earlier turn is dropped": dropped_history,
    "a turn is there twice": doubled_turn,
    "a turn and its result are there twice": doubled_exchange,
    "two turns are swapped": swapped_turns,
    "a turn is that of another row": turn_of_another_row,
    "two rows are merged": merged_rows,
    "the row is truncated in a turn": truncated,
    "the row is truncated at its start": lambda rows: cut(rows[0], 0, spans(rows[0])[0][0] // 2),
    "a row is there twice": lambda rows: [*rows, deepcopy(rows[0])],
    "turns are trained again in another row": trained_again,
    "a result is missing": lost_delta,
    "a result is appended": appended(0),
    "a result is appended and trained": appended(1),
    "the logprobs are shifted": change_logprobs(lambda own, _: [*own[1:], own[0]]),
    "the logprobs are those of another turn": copied_logprobs,
    "the logprobs are those of another row": logprobs_of_another_row,
    "the logprobs are zero": change_logprobs(lambda own, _: [0.0] * len(own)),
    "the logprobs are positive": change_logprobs(lambda own, _: [-value for value in own]),
    "the logprobs have another temperature": change_logprobs(
        lambda own, _: [0.7 * value for value in own]
    ),
    "the logprobs were computed again": change_logprobs(
        lambda own, _: [value - 0.001 for value in own]
    ),
    "a logprob is missing": change_logprobs(lambda own, _: [None, *own[1:]]),
    "the message of a result is another one": other_message("tool", content="Nothing."),
    "the message of a turn is another one": other_message("assistant", content="I refuse."),
    "the messages lack the tools": lambda rows: rows[0].update(tools=[]),
}
