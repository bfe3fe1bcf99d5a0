"""`audit`: checks the rows that a trainer trains on. Returns an `AuditReport`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolroll.evaluation.audit.faults import plain_faults, served_faults
from toolroll.evaluation.audit.record import EngineRecord
from toolroll.evaluation.audit.row import Fault, Row, row_of
from toolroll.evaluation.audit.template import UNMATCHED, TemplateCheck

UNDECIDED = "undecided: "


@dataclass(slots=True)
class Kind:
    """The faults of one kind: the rows (`Row.place`), the number of places, and the first one."""

    rows: list[str]
    places: int
    row: Row
    fault: Fault


@dataclass(slots=True)
class AuditReport:
    """What `audit` found.

    `kinds`: the faults, by kind; the kinds that start with "undecided: " are perhaps no faults,
    which only the engine's record can decide. `with_messages`: the rows that were compared with the
    template; `unmatched_rows`: those with a trained turn that was not found in the messages.
    `untrained_rows`: those without a trained token. `without_logprobs`: those with trained tokens
    and no logprob. `delivered_tokens`: the sampled tokens of the record that are trained, or None.
    """

    record: EngineRecord | None = None
    rows: int = 0
    faulty_rows: int = 0
    with_messages: int = 0
    unmatched_rows: int = 0
    untrained_rows: int = 0
    without_logprobs: int = 0
    trained_tokens: int = 0
    delivered_tokens: int | None = None
    kinds: dict[str, Kind] = field(default_factory=dict)

    def add(self, row: Row, faults: Iterable[Fault]) -> None:
        """Count the faults of `row`."""
        self.rows += 1
        self.trained_tokens += int(row.trained.sum())
        self.untrained_rows += not row.trained.any()
        self.without_logprobs += bool(row.trained.any() and np.isnan(row.logprobs).all())
        places: dict[str, list[Fault]] = {}
        for fault in faults:
            places.setdefault(("" if fault.sure else UNDECIDED) + fault.kind, []).append(fault)
        self.faulty_rows += any(not name.startswith(UNDECIDED) for name in places)
        for name, same_kind in places.items():
            kind = self.kinds.setdefault(name, Kind([], 0, row, same_kind[0]))
            kind.rows.append(row.place)
            kind.places += len(same_kind)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data, for `toolroll audit --json`."""
        names = (
            "rows faulty_rows with_messages unmatched_rows untrained_rows without_logprobs "
            "trained_tokens delivered_tokens"
        ).split()
        kinds = {
            name: {
                "rows": len(kind.rows),
                "share": len(kind.rows) / self.rows,
                "places": kind.places,
                "in": kind.rows,
                "first": [kind.row.place, kind.fault.start, kind.fault.stop],
            }
            for name, kind in self.kinds.items()
        }
        sampled = None if self.record is None else self.record.sampled_tokens
        counts = {name: getattr(self, name) for name in names}
        return {**counts, "sampled_tokens": sampled, "kinds": kinds}


def audit(
    rows: Iterable[Mapping[str, Any] | Row],
    *,
    record: EngineRecord | None = None,
    template: TemplateCheck | None = None,
) -> AuditReport:
    """Return what is wrong with `rows`. Only one row is kept in memory at a time.

    Args:
        rows: The rows, as `row_of` reads them: dicts with `input_ids`, `loss_mask` and `logprobs`,
            for example.
        record: What the engine was sent and sampled. Its answers are used up: a later call with the
            same record finds what is trained again.
        template: The chat template with which rows that have messages are compared.

    Raises:
        UsageError: a row cannot be read.
    """
    report = AuditReport(record)
    for number, data in enumerate(rows, 1):
        row = data if isinstance(data, Row) else row_of(data, f"row {number}")
        faults = plain_faults(row)
        if template is not None and row.messages:
            report.with_messages += 1
            compared = template.check(row)
            has_turn = any(message.get("role") == "assistant" for message in row.messages)
            is_unmatched = any(fault.kind == UNMATCHED for fault in compared)
            report.unmatched_rows += has_turn and is_unmatched  # of trained tokens only
            faults += compared
        if record is not None:
            served, delivered = served_faults(row, record)
            faults = [fault for fault in faults if fault.sure] + served
            report.delivered_tokens = (report.delivered_tokens or 0) + delivered
        report.add(row, dict.fromkeys(faults))
    return report
