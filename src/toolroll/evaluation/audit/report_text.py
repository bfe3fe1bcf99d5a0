"""`report_parts`: the lines of an audit's report, and the tokens of the first faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from toolroll.evaluation.audit.report import AuditReport, Kind
from toolroll.evaluation.audit.template import PROMPT, UNMATCHED
from toolroll.evaluation.viewer.data import Pieces

_AROUND, _MOST, _LISTED = 12, 40, 5


class ShownToken(NamedTuple):
    """A token at the first fault. `fault`: it belongs to the fault."""

    text: str
    trained: bool
    fault: bool


class Heading(NamedTuple):
    """The name of a kind of fault, and how many rows and places have it."""

    name: str
    size: str


ReportPart = str | Heading | list[ShownToken]
"""A line of the report, the heading of a kind of fault, or the tokens of the first such fault."""


def report_parts(report: AuditReport, tokenizer: Any) -> Iterator[ReportPart]:
    """Yield the parts of `report`. Without a `tokenizer`, a token's text is its id."""
    record = report.record
    yield f"{report.faulty_rows} of {report.rows} rows have a fault"
    if record is not None:
        share = (report.delivered_tokens or 0) / record.sampled_tokens
        count = record.sampled_tokens
        yield f"{share:.1%} of the {count} sampled tokens are in turns that are trained as sampled"
        if record.without_ids:
            yield f"{record.without_ids} prompts were sent as text: give the engine's --model"
    else:
        yield "Not checked without --requests: what the engine was sent and sampled"
    if report.without_logprobs and record is None:
        rows = _count(report.without_logprobs, "row")
        yield f"Not checked without logprobs ({rows}): whether trained tokens were sampled"
    if not report.with_messages and record is None:
        yield "Not checked without --model and rows with messages: the text of prompts and turns"
    if report.untrained_rows:
        yield f"{_count(report.untrained_rows, 'row')} without a trained token"
    for name, kind in report.kinds.items():
        share = len(kind.rows) / report.rows
        size = f"{_count(len(kind.rows), 'row')} ({share:.1%}), {_count(kind.places, 'place')}"
        yield Heading(name, size)
        if len(kind.rows) > 1:
            more = f" and {len(kind.rows) - _LISTED} others" if len(kind.rows) > _LISTED else ""
            yield f"in {'; '.join(Path(place).name for place in kind.rows[:_LISTED])}{more}"
        yield f"{kind.row.place}, tokens {kind.fault.start} to {kind.fault.stop}:"
        yield list(_tokens(kind, tokenizer))
        if name.endswith(UNMATCHED) and report.unmatched_rows == report.with_messages:
            yield "is --model the tokenizer of these rows?"
        if name.endswith(PROMPT) and not kind.row.tools:
            yield "the row has no `tools`: if the model had some, the prompt shows them"
    if report.kinds:
        ids = "" if tokenizer is not None else "; --model decodes the ids"
        yield f"(the first fault of each kind is shown{ids})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _tokens(kind: Kind, tokenizer: Any) -> Iterator[ShownToken]:
    """Yield the tokens of the first fault and around it."""
    row, (_, start, stop, _) = kind.row, kind.fault
    first, last = max(0, start - _AROUND), min(stop, start + _MOST) + _AROUND
    ids = row.ids[first:last].tolist()
    pieces = [f"{index} " for index in ids] if tokenizer is None else Pieces(tokenizer).of(ids)
    for index, piece in enumerate(pieces, first):
        text = piece if piece.isprintable() else repr(piece)[1:-1]
        yield ShownToken(text, bool(row.trained[index]), start <= index < stop)
