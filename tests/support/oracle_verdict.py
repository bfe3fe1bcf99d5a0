"""Judge an implementation with the oracle.

Invariants: a refusal is correct only if no append exists (or, with `history="preserve"`, if no tail
is defined), so an implementation cannot pass by refusing; every exception that is neither a fork
nor a refusal is a crash.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from support.oracle import Case, Inapplicable, Oracle, Refused, Truth
from support.oracle_scenarios import Message, Scenario, Tool, scenarios

History = Literal["fork", "preserve"]
Outcome = tuple[Literal["append", "fork", "refuse", "crash"], Any]
BAD = frozenset(("refused-unneeded", "wrong", "injected", "crashed"))


class Implementation(Protocol):
    """What is judged: one tokenizer with its template."""

    def prompt(self, messages: list[Message], tools: list[Tool] | None) -> Outcome: ...

    def delta(self, case: Case) -> Outcome: ...


@dataclass(frozen=True)
class Row:
    """One cell of the table."""

    scenario: str
    truth: str
    verdict: str
    detail: str = ""


def verdict(truth: Truth, outcome: Outcome, history: History) -> str:
    what, value = outcome
    if what == "crash":
        return "crashed"
    if what in ("fork", "refuse"):
        kept = truth.kind == "rewrite" and history == "preserve" and truth.input_ids is not None
        return "refused-unneeded" if kept or truth.kind in ("append", "drift") else "fork-right"
    if truth.input_ids is not None and value == truth.input_ids:
        return "preserve-ok" if truth.kind == "rewrite" else "exact"
    return "injected" if truth.careless_ids is not None and value == truth.careless_ids else "wrong"


def judge_deltas(
    oracle: Oracle, implementations: Mapping[History, Implementation]
) -> dict[History, list[Row]]:
    """By policy, a row for each scenario; `inapplicable` if it says nothing of the template."""
    rows: dict[History, list[Row]] = {history: [] for history in implementations}
    for scenario in scenarios(sorted(oracle.control)):
        try:
            case, truth = oracle.judge(scenario)
        except (Inapplicable, Refused) as reason:
            for judged in rows.values():
                judged.append(Row(scenario.name, "inapplicable", "inapplicable", str(reason)))
            continue
        for history, implementation in implementations.items():
            rows[history].append(_row(oracle, scenario, truth, implementation.delta(case), history))
    return rows


def judge_prompts(
    oracle: Oracle, implementations: Mapping[History, Implementation]
) -> dict[History, list[Row]]:
    """By policy, which is not asked, a row for each different first prompt."""
    rows: dict[History, list[Row]] = {history: [] for history in implementations}
    for scenario in _prompts(scenarios(sorted(oracle.control))):
        try:
            truth = Truth("append", oracle.prompt(scenario.history, scenario.tools))
        except Refused:
            truth = Truth("raises")
        except Inapplicable as reason:
            for judged in rows.values():
                judged.append(Row(scenario.name, "inapplicable", "inapplicable", str(reason)))
            continue
        for history, implementation in implementations.items():
            outcome = implementation.prompt(
                list(scenario.history), list(scenario.tools) if scenario.tools else None
            )
            rows[history].append(_row(oracle, scenario, truth, outcome, "fork"))
    return rows


def _row(
    oracle: Oracle, scenario: Scenario, truth: Truth, outcome: Outcome, history: History
) -> Row:
    word = verdict(truth, outcome, history)
    return Row(
        scenario.name, truth.kind, word, _detail(oracle, truth, outcome) if word in BAD else ""
    )


def _prompts(all_scenarios: Iterable[Scenario]) -> list[Scenario]:
    seen: dict[str, Scenario] = {}
    for scenario in all_scenarios:
        seen.setdefault(repr((scenario.history, scenario.tools)), scenario)
    return list(seen.values())


def outcome_of(
    make: Callable[[], list[int]], fork: type[Exception], refuse: type[Exception]
) -> Outcome:
    """What a call came to: `fork` and `refuse` are the implementation's own errors."""
    try:
        return "append", [int(index) for index in make()]
    except fork as error:
        return "fork", error
    except refuse as error:
        return "refuse", error
    except Exception as error:
        return "crash", error


def _detail(oracle: Oracle, truth: Truth, outcome: Outcome) -> str:
    what, value = outcome
    expected = None if truth.input_ids is None else oracle.tokenizer.decode(truth.input_ids)
    got = oracle.tokenizer.decode(value) if what == "append" else f"{type(value).__name__}: {value}"
    same = " (the same text in other tokens)" if got == expected else ""
    return f"{truth.kind}: expected {expected!r:.400}, got {what} {got!r:.400}{same}"
