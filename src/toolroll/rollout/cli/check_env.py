"""The table of `toolroll check-env`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from toolroll.rollout.runs.environment_check import CheckResult, check

__all__ = ["check", "results_table"]

_COLORS = {"ok": "green", "failed": "bold red", "not applicable": "dim"}


def results_table(name: str, results: Sequence[CheckResult]) -> Table:
    """Return a table with one row per check of the environment `name`."""
    table = Table(title=name, title_justify="left")
    table.add_column("check")
    table.add_column("result")
    table.add_column("detail", overflow="fold")
    for result in results:
        color = _COLORS[result.status]
        detail = result.detail.replace("[", "\\[")
        table.add_row(result.name, f"[{color}]{result.status}[/]", detail)
    return table
