"""`python -m benchmarks [PART ...] [--quick] [--peers FOLDER] [--out FILE]`: measure."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.tables import machine

PARTS = ("deltas", "templates", "texts", "loop", "throughput", "endpoint", "memory", "wire")
INTRODUCTION = """# Speed benchmarks

`make bench` writes this page from one run. Do not edit it. [Speed](speed.md) explains the figures.

Compare ratios, not microseconds: they vary by 20 % or more between runs.
"""


def main() -> None:
    """Run the parts that the command line selects."""
    reader = argparse.ArgumentParser(prog="python -m benchmarks")
    reader.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    reader.add_argument(
        "--quick", action="store_true", help="fewer conversations, rounds and episodes"
    )
    reader.add_argument(
        "--peers",
        type=Path,
        help="a folder with other projects' packages (pip install --no-deps --target)",
    )
    reader.add_argument("--out", type=Path, help="the Markdown file to write")
    asked = reader.parse_args()
    if asked.peers:
        sys.path.append(str(asked.peers))
    parts, texts = asked.parts or PARTS, []
    for part in parts:
        texts.append(measured(part, asked) if len(parts) > 1 else table(part, quick=asked.quick))
        print(texts[-1], flush=True)
    if asked.out:
        quick = (
            " Run with --quick: fewer conversations, rounds and episodes." if asked.quick else ""
        )
        load = f"load average {os.getloadavg()[0]:.1f} at the end"
        about = f"Machine: {machine()}; {load}.{quick}\n"
        asked.out.write_text("\n".join([INTRODUCTION, about, *texts]))


def table(part: str, *, quick: bool) -> str:
    """Return the table of `part`, measured in this process."""
    text: str = importlib.import_module(f"benchmarks.{part}").run(quick=quick).text()
    return text


def measured(part: str, asked: argparse.Namespace) -> str:
    """Return the table of `part`, measured in a fresh process, without memory of other parts."""
    command = [sys.executable, "-m", "benchmarks", part]
    command += ["--quick"] if asked.quick else []
    command += ["--peers", str(asked.peers)] if asked.peers else []
    return (
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.rstrip()
        + "\n"
    )


if __name__ == "__main__":
    main()
