"""What a run shows: a live progress bar in a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from toolroll.rollout.metrics import Summary
from toolroll.rollout.types import EnvironmentFactory, Episode

_LINES = 20  # without a terminal: one line for each twentieth of the run


class RunDisplay:
    """Shows the episodes of one environment as they finish. A context manager."""

    def __init__(self, console: Console, env: str, total: int) -> None:
        self.summary = Summary(env)
        self.seconds = 0.0
        self._console = console
        self._total = total
        self._began = time.perf_counter()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(env, total=total, state="")

    def __enter__(self) -> RunDisplay:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._began
        self._progress.stop()

    def add(self, episode: Episode) -> None:
        """Show one finished episode."""
        self.summary.add(episode)
        state = self._state()
        self._progress.update(self._task, advance=1, state=state)
        done = self.summary.episodes
        if not self._console.is_terminal and (done == self._total or done % max(1, self._total // _LINES) == 0):
            self._console.print(f"{self.summary.env}: {done}/{self._total}  {state}", highlight=False)

    def _state(self) -> str:
        summary = self.summary
        seconds = max(time.perf_counter() - self._began, 1e-9)
        rate = summary.totals["completion_tokens"] / seconds
        aborted = summary.statuses["aborted"]
        errors = f"  errors {aborted}" if aborted else ""
        return f"reward {_number(summary.mean_reward)}  {rate:,.0f} tok/s{errors}"


def results_table(summaries: list[tuple[Summary, float]]) -> Table:
    """The table at the end of a run: one column for each environment, so that it fits into 80 characters."""
    table = Table(title="toolroll", title_justify="left")
    table.add_column("", no_wrap=True)
    for summary, _ in summaries:
        table.add_column(summary.env, justify="right", no_wrap=True)
    for name, read in _ROWS:
        table.add_row(name, *(read(summary) for summary, _ in summaries))
    table.add_row("time", *(f"{seconds:.1f} s" for _, seconds in summaries))
    return table


_ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("episodes", lambda summary: str(summary.episodes)),
    ("reward (mean)", lambda summary: _number(summary.mean_reward)),
    ("pass rate", lambda summary: "-" if summary.pass_rate is None else f"{summary.pass_rate:.1%}"),
    ("turns (mean)", lambda summary: f"{summary.mean('turns'):.1f}"),
    ("tokens sampled (mean)", lambda summary: f"{summary.mean('completion_tokens'):.0f}"),
    ("tokens trained (mean)", lambda summary: f"{summary.mean('trained_tokens'):.0f}"),
    ("prompt tokens cached", lambda summary: f"{summary.cached_share:.0%}"),
    ("invalid calls", lambda summary: str(int(summary.totals["invalid_calls"]))),
    ("aborted", lambda summary: str(summary.statuses["aborted"])),
)


def remarks(summary: Summary) -> list[str]:
    """What a reader of the table must also know: how episodes ended, and any disagreement of tokens."""
    ends = ", ".join(f"{reason} {count}" for reason, count in summary.stop_reasons.most_common())
    lines = [f"{summary.env}: ended by {ends}"] if ends else []
    if summary.mismatches:
        kinds = ", ".join(f"{kind} {count}" for kind, count in summary.mismatches.items())
        lines.append(f"{summary.env}: TOKEN MISMATCHES, those samples are excluded from training: {kinds}")
    if summary.statuses["aborted"]:
        lines.append(f"{summary.env}: {summary.statuses['aborted']} aborted episodes count in no reward (infrastructure failed)")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def show_environments(factories: Sequence[EnvironmentFactory], console: Console) -> None:
    """The environments as a table; under it, whole and on one line each, the commands that install what is missing."""
    table = Table("environment", "splits", "what it is", "")
    missing: dict[str, list[str]] = {}
    for factory in factories:
        command = factory.missing()
        if command is not None:
            missing.setdefault(command, []).append(factory.name)
        ready = "[green]ready[/]" if command is None else "[yellow]to install[/]"
        table.add_row(factory.name, ", ".join(factory.splits), factory.description, ready)
    console.print(table)
    for command, names in missing.items():
        console.print(f"{', '.join(names)}:\n    {command}", highlight=False, markup=False, soft_wrap=True)
