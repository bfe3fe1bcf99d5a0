"""`python -m benchmarks [PART ...] [--quick] [--peers FOLDER] [--out FILE]`: measure, print the tables, and write them to a file."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks.tables import machine

PARTS = ("deltas", "loop", "throughput", "memory", "wire")
INTRODUCTION = """# Speed

Written by `make bench`, from one run. Read the ratios: all ways of a table were measured in turns within one run, as CPU time (of the
thread, or of the process where a table says "whole loop"), medians of rounds. The machine was not idle, so microseconds are high.
"""


def main() -> None:
    """Run what the command line asks for."""
    reader = argparse.ArgumentParser(prog="python -m benchmarks")
    reader.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    reader.add_argument("--quick", action="store_true", help="fewer conversations, rounds and episodes")
    reader.add_argument("--peers", type=Path, help="a folder with other projects' packages (pip install --no-deps --target)")
    reader.add_argument("--out", type=Path, help="the Markdown file to write")
    asked = reader.parse_args()
    if asked.peers:
        sys.path.append(str(asked.peers))
    texts = []
    for part in asked.parts or PARTS:
        texts.append(importlib.import_module(f"benchmarks.{part}").run(quick=asked.quick).text())
        print(texts[-1], flush=True)
    if asked.out:
        about = f"Machine: {machine()}; load average {os.getloadavg()[0]:.1f} at the end.\n"
        asked.out.write_text("\n".join([INTRODUCTION, about, *texts]))


if __name__ == "__main__":
    main()
