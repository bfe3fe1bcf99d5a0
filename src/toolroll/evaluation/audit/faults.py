"""The faults that a row shows by itself (`plain_faults`) and compared with the engine's record
(`served_faults`).
"""

from __future__ import annotations

import numpy as np

from toolroll.evaluation.audit.record import EngineRecord, prefix_sums
from toolroll.evaluation.audit.row import Fault, Row, runs

LABELS = "a label is not the token"
NO_PREFIX = "the first token is trained"
NO_LOGPROB = "trained without a logprob"
IMPOSSIBLE = "a logprob above zero"
NOT_WHOLE = "a part of an answer is not trained"
NOT_SAMPLED = "trained, but not sampled"
OTHER_PREFIX = "sampled after other tokens"
CUT = "the row ends in an answer"
TWICE = "trained twice"
LOGPROBS = "other logprobs than sampled"
_ABOVE_ZERO = 1e-3  # bf16 rounding of a log-softmax may end slightly above 0


def plain_faults(row: Row) -> list[Fault]:
    """Return the faults of `row` that need no other data."""
    has_logprob, trained = ~np.isnan(row.logprobs), row.trained
    wrong = {NO_PREFIX: trained & (np.arange(len(trained)) == 0)}
    if row.labels is not None:
        wrong[LABELS] = trained & (row.labels != row.ids)
    if has_logprob.any():
        wrong[NO_LOGPROB] = trained & ~has_logprob
        wrong[IMPOSSIBLE] = np.nan_to_num(row.logprobs) > _ABOVE_ZERO
    faults = [Fault(kind, *run) for kind, places in wrong.items() for run in runs(places)]
    for start, stop in runs(has_logprob):
        if trained[start:stop].any():  # the rest may be of other weights
            left = runs(~trained[start:stop])
            faults += [Fault(NOT_WHOLE, start + a, start + b, sure=False) for a, b in left]
    return faults


def served_faults(row: Row, record: EngineRecord) -> tuple[list[Fault], int]:
    """Return the faults of `row`, and the number of its trained tokens that are answers.

    Each run of trained tokens must be one or more whole answers to exactly the tokens before them.
    The answers are then used, so that no other row can have them.
    """
    sums, faults, delivered = prefix_sums(row.ids).tolist(), list[Fault](), 0
    for start, stop in row.spans():
        chain = record.chain(sums, start, stop, unused=True)
        if chain is not None:
            delivered += stop - start
            for first, last, answer in chain:
                if not answer.use(row.logprobs[first:last]):
                    faults.append(Fault(LOGPROBS, first, last))
        elif record.chain(sums, start, stop, unused=False) is not None:
            faults.append(Fault(TWICE, start, stop))
        else:
            faults += _reasons(row, record, sums, start, stop)
    return faults, delivered


def _reasons(row: Row, record: EngineRecord, sums: list[int], start: int, stop: int) -> list[Fault]:
    """Return the faults of the trained tokens [start, stop), which are not whole answers."""
    answered = np.zeros(len(row.ids), dtype=bool)
    for position in range(stop):
        for first, last, _ in record.after(sums, position):
            if last > start:
                answered[first:last] = True
    faults = []
    if not answered.any():
        length = record.length_of_output(row.ids[start:])
        if length * 2 >= stop - start:
            faults.append(Fault(OTHER_PREFIX, start, stop))
            answered[start : start + length] = True
        elif stop == len(row.ids) and record.longest(sums, start) > stop - start:
            return [Fault(CUT, start, stop)]
    trained = np.zeros(len(row.ids), dtype=bool)
    trained[start:stop] = True
    faults += [Fault(NOT_SAMPLED, *run) for run in runs(trained & ~answered)]
    faults += [Fault(NOT_WHOLE, *run) for run in runs(answered & ~row.trained)]
    return faults or [Fault(NOT_SAMPLED, start, stop)]
