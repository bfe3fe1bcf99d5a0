"""`audit`: checks the rows that a trainer trains on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolroll.audit.plain import plain_faults
from toolroll.audit.record import EngineRecord
from toolroll.audit.report import AuditReport, Fault
from toolroll.audit.row import Row, row_of
from toolroll.audit.served import served_faults
from toolroll.audit.template import TemplateCheck


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
    report = AuditReport(record=record)
    for number, data in enumerate(rows, 1):
        row = data if isinstance(data, Row) else row_of(data, f"row {number}")
        faults, undecided = plain_faults(row), list[Fault]()
        if record is not None:
            found, delivered = served_faults(row, record)
            faults += found
            report.delivered_tokens += delivered
        if template is not None and row.messages:
            report.with_messages += 1
            found, undecided = template.check(row)
            faults += found
        report.add(row, list(dict.fromkeys(faults)), undecided if record is None else [])
    return report
