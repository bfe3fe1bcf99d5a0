"""`plain_faults`: what the ids, the mask and the logprobs of a row show by themselves."""

from __future__ import annotations

import numpy as np

from toolroll.audit.report import Fault
from toolroll.audit.row import Row, runs
from toolroll.audit.served import NOT_WHOLE

LABELS = "a label is not the token"
NO_PREFIX = "the first token is trained"
NO_LOGPROB = "trained without a logprob"
IMPOSSIBLE = "a logprob above zero"
REPEATED = "two turns have the same logprobs"
_ABOVE_ZERO = 1e-3  # bf16 rounding of a log-softmax may end slightly above 0
_DISTINCT = 8  # short answers of a sure model have the same logprobs


def plain_faults(row: Row) -> list[Fault]:
    """Return the faults of `row` that need no other data."""
    known, faults = ~np.isnan(row.logprobs), list[Fault]()
    if row.labels is not None:
        wrong = row.trained & (row.labels != row.ids)
        faults += [Fault(LABELS, *run) for run in runs(wrong)]
    if row.trained[:1].any():
        faults.append(Fault(NO_PREFIX, 0, 1))
    with np.errstate(invalid="ignore"):
        impossible = row.logprobs > _ABOVE_ZERO
    faults += [Fault(IMPOSSIBLE, *run) for run in runs(impossible)]
    if known.any():
        faults += [Fault(NO_LOGPROB, *run) for run in runs(row.trained & ~known)]
        for start, stop in runs(known):  # a turn is trained as a whole, or not at all
            if row.trained[start:stop].any():
                left = known & ~row.trained
                left[:start] = left[stop:] = False
                faults += [Fault(NOT_WHOLE, *run) for run in runs(left)]
    return faults + _repeated(row)


def _repeated(row: Row) -> list[Fault]:
    seen: set[bytes] = set()
    faults = []
    for start, stop in row.spans():
        values = row.logprobs[start:stop]
        if len(np.unique(values[~np.isnan(values)])) >= _DISTINCT:
            if values.tobytes() in seen:
                faults.append(Fault(REPEATED, start, stop))
            seen.add(values.tobytes())
    return faults
