"""`AuditReport`: the faults that `audit` found, by kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from toolroll.audit.record import EngineRecord
from toolroll.audit.row import Row


class Fault(NamedTuple):
    """A fault of a row: its kind, and the tokens [start, stop) that have it."""

    kind: str
    start: int
    stop: int


@dataclass(slots=True)
class Kind:
    """The faults of one kind: the number of rows and of places, and the first one."""

    rows: int
    places: int
    row: Row
    fault: Fault


@dataclass(slots=True)
class AuditReport:
    """What `audit` found. `kinds` are faults. `undecided` are possible faults, which only the
    engine's record can decide.

    `with_messages`: the rows that were compared with the template. `delivered_tokens`: the trained tokens that the engine sampled, if there is a record.
    """

    rows: int = 0
    faulty_rows: int = 0
    with_messages: int = 0
    trained_tokens: int = 0
    delivered_tokens: int = 0
    kinds: dict[str, Kind] = field(default_factory=dict)
    undecided: dict[str, Kind] = field(default_factory=dict)
    record: EngineRecord | None = None

    def add(self, row: Row, faults: list[Fault], undecided: list[Fault]) -> None:
        """Count a row with its `faults` and what is `undecided`."""
        self.rows += 1
        self.faulty_rows += bool(faults)
        self.trained_tokens += int(row.trained.sum())
        for found, kinds in ((faults, self.kinds), (undecided, self.undecided)):
            for name in dict.fromkeys(fault.kind for fault in found):
                places = [fault for fault in found if fault.kind == name]
                kind = kinds.setdefault(name, Kind(0, 0, row, places[0]))
                kind.rows += 1
                kind.places += len(places)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data, for `toolroll audit --json`."""
        record = self.record
        return {
            "rows": self.rows,
            "faulty_rows": self.faulty_rows,
            "rows_with_messages": self.with_messages,
            "trained_tokens": self.trained_tokens,
            "faults": {name: self._kind(kind) for name, kind in self.kinds.items()},
            "undecided": {name: self._kind(kind) for name, kind in self.undecided.items()},
            "requests": None
            if record is None
            else {
                "answers": record.answers,
                "sampled_tokens": record.sampled_tokens,
                "delivered_tokens": self.delivered_tokens,
                "without_ids": record.without_ids,
            },
        }

    def _kind(self, kind: Kind) -> dict[str, Any]:
        example = {"row": kind.row.place, "start": kind.fault.start, "stop": kind.fault.stop}
        share = kind.rows / self.rows
        return {"rows": kind.rows, "share": share, "places": kind.places, "example": example}
