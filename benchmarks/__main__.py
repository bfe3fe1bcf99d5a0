"""`python -m benchmarks [PART ...] [--quick] [--check N] [--peers FOLDER] [--out FILE]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.clock import in_new_process
from benchmarks.conversations import QWEN, workload
from benchmarks.tables import Table, load, machine, named_figures, verdicts, with_figures

PARTS = ("loop", "deltas", "templates", "throughput", "endpoint", "memory", "audit")
PAGES = ("speed.md", "audit.md")
INTRODUCTION = """# Speed benchmarks

`make bench` writes this page. Do not edit it. [Speed](speed.md) explains the figures.

Compare ratios, not microseconds: they vary by 20 % or more between runs. CPU time is that of all
processes of a row, without the engine's stub. The raw encode is that of the new bodies, with the
tokenizer alone.
"""


def main() -> None:
    """Run the parts that the command line selects."""
    reader = argparse.ArgumentParser(prog="python -m benchmarks")
    reader.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    reader.add_argument("--quick", action="store_true", help="fewer rounds and episodes")
    reader.add_argument(
        "--check", type=int, default=1, metavar="N", help="run each part N times (default: 1)"
    )
    reader.add_argument(
        "--peers",
        type=Path,
        help="a folder with other projects' packages (pip install --no-deps --target)",
    )
    reader.add_argument(
        "--out", type=Path, help=f"the page to write; replaces the figures of {' and '.join(PAGES)}"
    )
    asked = reader.parse_args()
    if asked.peers:
        os.environ["BENCHMARK_PEERS"] = str(asked.peers.resolve())
    runs = []
    for _ in range(asked.check):
        runs.append([measured(part, quick=asked.quick) for part in asked.parts or PARTS])
    required = [[ratio for table in run for ratio in table.required] for run in runs]
    ratios = verdicts(required)
    ratios.notes.append(f"Number of runs: {len(runs)}. The tables below are from the last one.")
    if ratios.rows:
        print(ratios.text())
    if asked.out:
        write(asked.out, [ratios, *runs[-1]], quick=asked.quick)
        for page in PAGES:
            write_figures(asked.out.with_name(page), runs)
    missed = any(not ratio.held for run in required for ratio in run)
    sys.exit(1 if missed and asked.check > 1 else 0)


def measured(part: str, *, quick: bool) -> Table:
    """Measure `part` in a new process, and print its table."""
    table: Table = in_new_process(f"benchmarks.{part}", "run", quick=quick)
    print(f"{table.text()}\n({load()})\n", flush=True)
    return table


def write(path: Path, tables: Sequence[Table], *, quick: bool) -> None:
    """Write the page of all tables."""
    about = [
        f"Machine: {machine()}; {load()} at the end.",
        f"Conversations: {workload().source}; digits differ in each episode.",
        f"Template: {QWEN}, unless a row names another.",
        *(["Run with --quick: fewer rounds and episodes."] if quick else []),
    ]
    page = [INTRODUCTION, " ".join(about) + "\n", *(table.text() for table in tables)]
    path.write_text("\n".join(page))


def write_figures(path: Path, runs: Sequence[Sequence[Table]]) -> None:
    """Replace the figures in the page at `path` with those of all runs, and print which were not
    measured.
    """
    figures: dict[str, list[float]] = {}
    for table in (table for run in runs for table in run):
        for name, amount in table.figures.items():
            figures.setdefault(name, []).append(amount)
    if not path.is_file():
        print(f"No figures were replaced, because there is no {path}")
        return
    page = path.read_text()
    path.write_text(with_figures(page, figures))
    unknown = sorted(named_figures(page) - set(figures))
    if unknown:
        print(f"Not measured, and unchanged in {path}: {', '.join(unknown)}")


if __name__ == "__main__":
    main()
