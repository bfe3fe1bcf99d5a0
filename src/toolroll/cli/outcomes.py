"""`show_outcomes`: prints what became of runs, and ends the command with its exit status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from toolroll.cli.display import print_line, program, show_reports

if TYPE_CHECKING:
    from toolroll.cli.run_command import Outcome


def show_outcomes(
    results: Mapping[str, Outcome],
    console: Console,
    *,
    resumes: bool = True,
    max_lost: float = 0.0,
) -> None:
    """Print the results: a table, remarks, and the names of the files.

    `results`: the outcomes by column title. `resumes`: True if the same command can continue the
    run. `max_lost`: the share of the episodes that may lack a reward.

    Exit with 128 + the number of the signal that ended the run early, or with 1 if too many
    episodes lack a reward. Raise the error that ended the run early.
    """
    outcomes = list(results.values())
    show_reports({title: outcome.report for title, outcome in results.items()}, console)
    folders = list(dict.fromkeys(str(run.folder) for run in outcomes if run.folder is not None))
    if folders:
        print_line(console, files_line(folders))
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    stopped = next((outcome.stopped for outcome in outcomes if outcome.stopped is not None), None)
    if stopped is not None:
        console.print(
            "Stopped early; the same command continues from here."
            if folders and resumes
            else "Stopped early."
        )
        raise typer.Exit(128 + stopped)
    failed = False
    for outcome in outcomes:
        name, lost = outcome.summary.env, outcome.report["lost"]
        if lost["episodes"] and not outcome.summary.graded:
            problem = "no episode has a reward"
        elif lost["share"] > max_lost:
            problem = (
                f"{lost['episodes']} of {lost['of_episodes']} episodes have no reward, and "
                f"--max-lost allows a share of {max_lost:g}"
            )
        else:
            continue
        failed = True
        cause = f". The last aborted episode: {outcome.failure}" if outcome.failure else ""
        print_line(console, f"{name}: {problem}{cause}")
    if failed:
        raise typer.Exit(1)


def files_line(folders: Sequence[str]) -> str:
    """Return the line that says what the folders of runs contain, and how to view the first one."""
    files = f"In {' and '.join(folders)}: run.json, episodes.jsonl, summary.json; to view"
    return f"{files} {'the first' if folders[1:] else 'them'}: {program()} view {folders[0]}"
