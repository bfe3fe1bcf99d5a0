"""`served_faults`: compares the trained tokens of a row with the engine's own record."""

from __future__ import annotations

import numpy as np

from toolroll.audit.record import EngineRecord, Places
from toolroll.audit.report import Fault
from toolroll.audit.row import Row, runs

NOT_SAMPLED = "trained, but not sampled"
NOT_WHOLE = "a part of an answer is not trained"
OTHER_PREFIX = "sampled after other tokens"
CUT = "the row ends in an answer"
TWICE = "trained twice"
LOGPROBS = "other logprobs than sampled"


def served_faults(row: Row, record: EngineRecord) -> tuple[list[Fault], int]:
    """Return the faults of `row`, and the number of its trained tokens that are answers.

    Each run of trained tokens must be one or more whole answers to exactly the tokens before them.
    The answers are then used, so that no other row can have them.
    """
    places, faults, delivered = record.places(row.ids), list[Fault](), 0
    for start, stop in row.spans():
        chain = places.chain(start, stop, unused=True)
        if chain is None:
            twice = places.chain(start, stop, unused=False) is not None
            wrong = [Fault(TWICE, start, stop)] if twice else _reasons(row, record, places, start, stop)
            faults += wrong
            continue
        for served in chain:
            span = slice(served.start, served.stop)
            if not served.answer.take(row.logprobs[span]):
                faults.append(Fault(LOGPROBS, served.start, served.stop))
        delivered += stop - start
    return faults, delivered


def _reasons(
    row: Row, record: EngineRecord, places: Places, start: int, stop: int
) -> list[Fault]:
    """Return why the trained tokens [start, stop) are no answers."""
    answered = np.zeros(len(row.ids), dtype=bool)
    for served in places.all():
        if served.start < stop and served.stop > start:
            answered[served.start : served.stop] = True
    kind = NOT_SAMPLED
    if not answered.any():
        length = record.length_of_output(row.ids[start:])
        if length * 2 >= stop - start:
            kind, answered[start : start + length] = OTHER_PREFIX, True
        elif stop == len(row.ids) and places.longest(start) > stop - start:
            kind, answered[start:stop] = CUT, True
    faults = [] if kind == NOT_SAMPLED else [Fault(kind, start, stop)]
    trained = np.zeros(len(row.ids), dtype=bool)
    trained[start:stop] = True
    faults += [Fault(NOT_SAMPLED, *run) for run in runs(trained & ~answered)]
    faults += [Fault(NOT_WHOLE, *run) for run in runs(answered & ~row.trained)]
    return faults or [Fault(NOT_SAMPLED, start, stop)]
