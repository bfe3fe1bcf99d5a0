"""`toolroll compare`: prints how runs differ from a baseline run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolroll.rollout.cli.display import print_line, shortened
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.compare import SIGNIFICANT, Question, compare, read_runs

SCHEMA_VERSION = 1
EXIT_STATUS = {"worse": 3, "inconclusive": 4}
"""The exit status of a failed gate by verdict."""
_HEADER = ("", "baseline", "candidate", "difference [95 %]")
_MOST_TASKS = 8


def compare_folders(
    folders: Sequence[Path], env: str | None, question: Question
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the comparisons of the first folder with each other one, and messages about lines that
    cannot be read. `env`: compare only this environment.
    """
    if len(folders) < 2:
        raise UsageError("give at least two folders: the baseline, and what is compared with it")
    bad_lines: list[str] = []
    runs = [read_runs(folder, on_bad_line=bad_lines.append) for folder in folders]
    if env is not None:
        runs = [{name: run for name, run in found.items() if name == env} for found in runs]
    return compare(runs[0], runs[1:], question), shortened(bad_lines)


def exit_status(comparisons: Sequence[Mapping[str, Any]]) -> int:
    """Return the exit status of `--fail-if-worse`: 0 if no candidate is worse."""
    statuses = [EXIT_STATUS.get(comparison["verdict"], 0) for comparison in comparisons]
    return min(filter(None, statuses), default=0)


def show(comparison: Mapping[str, Any], console: Console) -> None:
    """Print one comparison as a table and lines."""
    table = Table(title=Text(_title(comparison)), title_justify="left")
    for name in _HEADER:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in _rows(comparison):
        table.add_row(*map(Text, row))
    console.print(table)
    for line in _lines(comparison):
        print_line(console, line)


def written(comparisons: Sequence[Mapping[str, Any]], *, as_json: bool) -> str:
    """Return the comparisons as JSON or as Markdown."""
    if not as_json:
        return "\n".join(map(_markdown, comparisons))
    content = {"schema_version": SCHEMA_VERSION, "comparisons": comparisons}
    return orjson.dumps(content, option=orjson.OPT_INDENT_2).decode()


def _markdown(comparison: Mapping[str, Any]) -> str:
    rows = [_HEADER, ("---", *["---:"] * 3), *_rows(comparison)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    lines = "\n".join(f"- {line}" for line in _lines(comparison))
    return f"**{_title(comparison)}**\n\n{table}\n\n{lines}\n"


def _title(comparison: Mapping[str, Any]) -> str:
    return "{env}: {base} and {candidate}".format_map(comparison)


def _rows(comparison: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    rates = {"reward (mean)": comparison["reward"]} | {
        f"pass^{k}": part for k, part in comparison["pass_hat_k"].items()
    }
    rows = [
        (
            name,
            f"{part['base']:.3f}",
            f"{part['candidate']:.3f}",
            "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format_map(part),
        )
        for name, part in rates.items()
    ]
    rows += [
        (name, f"{part['base']:.4g}", f"{part['candidate']:.4g}", "")
        for name, part in comparison["usage"].items()
    ]
    aborted = comparison["coverage"]["aborted"]
    return [*rows, ("aborted", str(aborted["base"]), str(aborted["candidate"]), "")]


def _lines(comparison: Mapping[str, Any]) -> list[str]:
    coverage, reward, changed = (comparison[name] for name in ("coverage", "reward", "changed"))
    lines = [
        f"{comparison['verdict']} (p = {reward['p_holm']:.3g}); such runs show a difference of "
        f"{comparison['detectable']:.3f} with the power 0.8",
        "compared: {tasks} of {of_tasks} tasks, {samples} of {of_samples} samples".format_map(
            coverage
        ),
    ]
    if coverage["other_data"]:
        lines.append(f"tasks with other data: {_some(coverage['other_data'])}")
    if comparison["mcnemar"] is not None:
        lines.append("McNemar's exact test: p = {p:.3g}".format_map(comparison["mcnemar"]))
    if power := comparison.get("power_for"):
        lines.append(
            "a difference of {difference:g}: the power is {power:.2f}; {tasks} tasks show it with "
            "the power 0.8".format_map(power)
        )
    if equivalence := comparison.get("equivalence"):
        answer = "" if equivalence["p"] <= SIGNIFICANT else "not shown to be "
        lines.append(
            f"{answer}equivalent within {{margin:g}} (p = {{p:.3g}})".format_map(equivalence)
        )
    for name in ("worse", "better"):
        if changed[name]:
            tasks = ["{task} {base:.2f} -> {candidate:.2f}".format_map(t) for t in changed[name]]
            lines.append(f"{name} in {len(tasks)} tasks: {_some(tasks)}")
    return lines + [f"also different: {line}" for line in comparison["settings"]]


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_MOST_TASKS]) + (", ..." if len(texts) > _MOST_TASKS else "")
