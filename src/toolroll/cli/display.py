"""The output of the commands: lines, the progress of a run (a live bar in a terminal, plain lines
elsewhere), and the tables.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from toolroll.evaluation.run_config import played_with
from toolroll.rollout.errors import UsageError

if TYPE_CHECKING:
    from toolroll.rollout.environment import EnvironmentFactory
    from toolroll.rollout.episode import Episode
    from toolroll.rollout.runs.summary import Summary
    from toolroll.trainers.frameworks import Framework

_SECONDS = 30.0
"""Without a terminal, the least time between two lines. In a long run, it is a tenth of the time
since the start.
"""
_MOST_LINES = 5
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Output(Console):
    """A console whose failure to write is an error of the command, not an exit in its midst."""

    def on_broken_pipe(self) -> None:
        """Discard the rest, and raise `UsageError`."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise UsageError("standard output was closed by the program that reads it") from None


def print_line(console: Console, line: str) -> None:
    """Print `line`. rich does not interpret markup or emoji names, or wrap the line. A line may
    quote a model: characters that control a terminal become `?`.
    """
    console.print(
        _CONTROL.sub("?", line), markup=False, emoji=False, highlight=False, soft_wrap=True
    )


def page_line(page: Path, content: str = "") -> str:
    """Return the line that says where a command wrote a page, and its `content`."""
    size = page.stat().st_size / 1e6
    return f"{page}: {content}{size:.1f} MB; open it in a browser"


def program() -> str:
    """Return the command as the user started it: its path, such as .venv/bin/toolroll, if it is not
    on PATH.
    """
    started_as = Path(sys.argv[0])
    on_path = started_as.name != "toolroll" or shutil.which("toolroll") is not None
    return "toolroll" if on_path else str(started_as)


def shortened(lines: Sequence[str]) -> list[str]:
    """Return the first of `lines`, and the number of the others."""
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], *([f"... and {more} more such lines"] if more > 0 else [])]


class RunDisplay:
    """Shows the progress of one environment's run. This is a context manager.

    `summary` contains the episodes of earlier runs. Add each new episode to `summary` before you
    call `show`. `sampled` returns the turns and tokens that were sampled so far, also those of
    unfinished episodes, or less if they cannot be counted here. `split` is shown after the name of
    the environment.
    """

    def __init__(
        self,
        console: Console,
        summary: Summary,
        total: int,
        sampled: Callable[[], tuple[int, int]] = lambda: (0, 0),
        *,
        split: str = "",
    ) -> None:
        self.summary = summary
        self.seconds = 0.0
        self._name = f"{summary.env} {split}".rstrip()
        self._console = console
        self._total = total
        self._sampled = sampled
        self._before = sampled()
        self._began = time.perf_counter()
        self._turns = self._tokens = 0.0
        self._shown = 0
        self._next_line = _SECONDS
        self._left = max(total - summary.episodes, 1)
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            expand=True,
        )
        self._task = self._progress.add_task(
            self._name, total=total, completed=summary.episodes, left="-"
        )
        self._live = Live(console=console, get_renderable=self._lines)

    def __enter__(self) -> RunDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self._live.stop()

    def show(self, episode: Episode) -> None:
        """Update the progress after an episode has finished."""
        self._turns += episode.result.metrics.get("turns", 0.0)
        self._tokens += episode.result.metrics.get("completion_tokens", 0.0)
        self._shown += 1
        seconds = time.perf_counter() - self._began
        # Short episodes end first: until 5 % have ended, and 5 episodes, an estimate is noise.
        known = self._shown >= min(self._left, max(5, self._left / 20))
        left = _time((self._left - self._shown) * seconds / self._shown) if known else "-"
        self._progress.update(self._task, advance=1, left=left)
        if not self._console.is_terminal and (
            self._shown == self._left or seconds >= self._next_line
        ):
            self._next_line = seconds + max(_SECONDS, seconds / 10)
            done = f"{self._name}: {self.summary.episodes}/{self._total}"
            print_line(self._console, f"{done}  {self._state()}{f'  {left} left' * known}")

    def _lines(self) -> Group:
        """Return the bar, and below it what has no room beside it."""
        return Group(self._progress, Text(self._state()))

    def _state(self) -> str:
        summary = self.summary
        seconds = max(self.seconds or time.perf_counter() - self._began, 1e-9)
        now = self._sampled()
        turns = max(self._turns, now[0] - self._before[0])
        tokens = max(self._tokens, now[1] - self._before[1])
        parts = [
            f"reward {_number(summary.mean_reward)}",
            f"{self._shown / seconds:,.1f} episodes/s",
            f"{turns / seconds:,.1f} turns/s",
            f"{tokens / seconds:,.0f} tok/s",
        ]
        if held := summary.totals["held_turns"]:
            parts.append(f"{held:,.0f} turns held")
        if aborted := summary.statuses["aborted"]:
            parts.append(f"errors {aborted}")
        return "  ".join(parts)


def show_reports(reports: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print the tables of `reports`, which are by column title, and the lines below them."""
    for table in results_tables(reports):
        console.print(table)
    for title, report in reports.items():
        for line in remarks(title.partition("\n")[0], report):
            print_line(console, line)


def results_tables(reports: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Return the tables at the end of a run. Each shows at most two reports, because more do not
    fit in 80 characters.
    """
    names = list(reports)
    return [
        results_table({name: reports[name] for name in names[start : start + 2]})
        for start in range(0, len(names), 2)
    ]


def results_table(reports: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with one column per report. With one or two reports, the table fits in 80
    characters.
    """
    table = Table(title="toolroll: means [95 % intervals]", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in reports:
        table.add_column(Text(name), justify="right", no_wrap=True)
    gap = " " if len(reports) == 1 else "\n"
    for name, read in [*_FIRST_ROWS, *_pass_rows(reports.values()), *_LAST_ROWS]:
        table.add_row(name, *(read(report).replace("\n", gap) for report in reports.values()))
    return table


Read = Callable[[Mapping[str, Any]], str]

_FIRST_ROWS: tuple[tuple[str, Read], ...] = (
    ("episodes", lambda report: str(report["episodes"])),
    ("reward (mean)", lambda report: _estimate(report["reward"])),
)

_LAST_ROWS: tuple[tuple[str, Read], ...] = (
    ("do-nothing baseline", lambda report: _floor(report["do_nothing"])),
    ("turns (mean)", lambda report: f"{report['turns']['mean']:.1f}"),
    ("tokens sampled (mean)", lambda report: _tokens(report, "completion")),
    (
        "tokens trained (mean)",
        lambda report: _tokens(report, "trained") if report["trainable"] else "not trainable",
    ),
    ("forks", lambda report: str(report["forks"])),
    ("prompt tokens cached", lambda report: f"{report['tokens']['cached_share']:.0%}"),
    ("computed again (mean)", lambda report: _tokens(report, "recomputed")),
    ("tool calls", lambda report: _tool_calls(report["tool_calls"])),
    ("invalid calls", lambda report: _invalid(report["invalid_calls"])),
    ("aborted", lambda report: str(report["aborted"])),
    (
        "time",
        lambda report: "-" if report["seconds"] is None else f"{report['seconds']:.1f} s",
    ),
)

_SHOWN_K = (1, 2, 4, 8, 16, 32)


def _pass_rows(reports: Iterable[Mapping[str, Any]]) -> list[tuple[str, Read]]:
    """Return rows of pass^k and pass@k for each k of `_SHOWN_K` that any report has, and for the
    largest. For k = 1 there is only one row, because both values are the same.
    """
    parts = [report["pass@k"] or {} for report in reports]
    bounds = [report["pass_bounds"] for report in reports if report["pass_bounds"]]
    lost = [part["pass@k"] for part in bounds]
    available = {int(k) for part in [*parts, *lost] for k in part}
    rows: list[tuple[str, Read]] = []
    for k in sorted(available & {*_SHOWN_K, max(available, default=1)}):
        for kind in ("pass^k", "pass@k")[: 2 if k > 1 else 1]:
            name = kind.replace("k", str(k)) if k > 1 else "pass^1 = pass@1"
            rows.append((name, partial(_rate, kind=kind, k=k)))
            if any(str(k) in part[kind] for part in bounds):
                rows.append(("  lost: failed, passed", partial(_bounds, kind=kind, k=k)))
    return rows


def _rate(report: Mapping[str, Any], *, kind: str, k: int) -> str:
    return _estimate((report[kind] or {}).get(str(k)))


def _estimate(value: Mapping[str, float] | None) -> str:
    """Return a rate, its interval and the tasks that it covers, as two lines."""
    if value is None:
        return "-"
    tasks, of_tasks = value["tasks"], value["of_tasks"]
    covered = f"{tasks} of {of_tasks}" if tasks < of_tasks else f"{tasks}"
    return (
        f"{value['value']:.3f} [{value['low']:.2f}, {value['high']:.2f}]"
        f"\n({covered} {'tasks' if of_tasks > 1 else 'task'})"
    )


def _bounds(report: Mapping[str, Any], *, kind: str, k: int) -> str:
    pair = report["pass_bounds"] and report["pass_bounds"][kind].get(str(k))
    return "{:.3f}, {:.3f}".format(*pair) if pair else "-"


def _floor(floor: Mapping[str, Any] | None) -> str:
    if floor is None:
        return "-"
    lost = f" ({floor['aborted']} aborted)" if floor["aborted"] else ""
    return f"{floor['passed']}/{floor['episodes'] - floor['aborted']}{lost}"


def _tokens(report: Mapping[str, Any], name: str) -> str:
    return f"{report['tokens'][name]['mean']:.0f}" if name in report["tokens"] else "-"


def _tool_calls(calls: Mapping[str, Any]) -> str:
    errors = sum(tool["errors"] or 0 for tool in calls["by_tool"].values())
    return f"{calls['attempted']}{f' (errors: {errors})' if errors else ''}"


def _invalid(invalid: Mapping[str, Any]) -> str:
    rate = f" ({invalid['rate']:.1%})" if invalid["rate"] else ""
    return f"{invalid['total']}{rate}"


def listed(values: Mapping[str, Any]) -> str:
    """Return names and values as one text."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def remarks(name: str, report: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table: what was played, or regraded, why episodes ended, invalid
    calls by kind, and warnings.
    """
    ends = ", ".join(
        f"{reason} {count}"
        for reason, count in sorted(report["stop_reasons"].items(), key=lambda item: -item[1])
    )
    played = listed(played_with(report["settings"]))
    lines = [f"{name}: {played}"] if played else []
    regraded = [entry["regraded"] for entry in report["provenance"] if "regraded" in entry]
    lines += [f"{name}: regraded from {folder}" for folder in regraded[-1:]]
    if ends:
        lines.append(f"{name}: ended by {ends}")
    kinds = ", ".join(
        f"{kind} {part['count']}" for kind, part in report["invalid_calls"]["by_kind"].items()
    )
    if kinds:
        lines.append(f"{name}: invalid calls: {kinds}")
    if report["lookalike_calls"]:
        lines.append(f"{name}: text that looks like a tool call: {report['lookalike_calls']}")
    judge = report["judge"]
    if judge is not None:
        lines.append(
            f"{name}: the judge agrees with the rule in {judge['agreement']:.1%} of "
            f"{judge['episodes']} episodes (passed by the judge only: "
            f"{judge['passed_by_judge_only']}, by the rule only: {judge['passed_by_rule_only']})"
        )
    return lines + [f"{name}: WARNING: {warning}" for warning in report["warnings"]]


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def show_frameworks(frameworks: Sequence[Framework], console: Console) -> None:
    """Print each adapter as a block of lines, so that no name is truncated."""
    from toolroll.trainers.frameworks import SUPPORT

    for framework in frameworks:
        console.print(f"[bold]{framework.name}[/]", framework.version, highlight=False)
        print_line(console, f"  {framework.path}")
        print_line(console, f"  an episode that forked: {framework.forks}")
        print_line(console, f"  an aborted episode: {framework.aborted}")
        print_line(console, f"  an interrupted turn: {framework.interrupted}")
        for label, answer in zip(SUPPORT, framework.support, strict=True):
            print_line(console, f"  {label}: {answer}")


def show_environments(factories: Sequence[EnvironmentFactory], console: Console) -> None:
    """Print the environments as a table. Below the table, print the commands that install missing
    packages. Each command is one line, so that it can be copied.
    """
    table = Table()
    table.add_column("environment", no_wrap=True)
    table.add_column("splits", overflow="fold")
    table.add_column("what it is", overflow="fold")
    table.add_column("", no_wrap=True)
    missing: dict[str, list[str]] = {}
    for factory in factories:
        command = factory.missing()
        if command is not None:
            missing.setdefault(command, []).append(factory.name)
        ready = "[green]ready[/]" if command is None else "[yellow]to install[/]"
        texts = (factory.name, ", ".join(factory.splits), factory.description)
        table.add_row(*map(Text, texts), ready)
    console.print(table)
    for command, names in missing.items():
        print_line(console, f"{', '.join(names)}:\n    {command}")
