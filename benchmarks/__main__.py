"""`python -m benchmarks [PART ...] [--quick] [--peers FOLDER] [--out FILE]`: measure, print the tables, and write them to a file."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks.tables import machine

PARTS = ("deltas", "templates", "loop", "throughput", "memory", "wire")
INTRODUCTION = """# Speed

Written by `make bench`, from one run. Read the ratios: all ways of a table were measured in turns within one run, as CPU time, medians
of rounds. A machine that does other work besides makes microseconds high and moves ratios by 20 % and more from run to run, and it
makes the table of throughput a table of the machine: a share of what latencies allow needs the CPU that the last column asks for.

What the figures rest on: frames (the fixed text around new messages is learned once, kept as ids, and shared by all histories that the
template cannot tell apart); words (each is encoded once and looked up from then on: the ways of others encode every body anew); heads
(system text and tools are encoded once); ids as arrays, and as JSON that grows; one HTTP session without a limit; an executor of the
size of the concurrency; few objects for the garbage collector, and in `toolroll run` and `serve` a collector that runs by the clock.
`tests/unit/test_speed.py` guards them by counts of calls, bytes and objects, and by ratios, in every run of the tests.

Some goals were set as times, from measurements on another machine (20 November 2026: a whole first prompt 3.6 ms, 12,000 ids as JSON
by orjson 44 us, the JSON of a reply of 500 tokens decoded in 43 us, the same tokens in Python lists 225 ms of a full collection).
They are judged as ratios to those, measured here in the same run: 0.2 ms for a known head is 0.056, 10 us for a request 0.23,
0.15 us a token for a reply 1.74, 10 ms of a collection 0.044.

What is slow: a delta of a shape that is seen for the first time ("nothing learned" below) is derived by renders of the whole
conversation, one where the model wrote its turn as the template does. Under a template that looks at history one message at a time
(Qwen3-Instruct's, below) shapes are few: 12 in the 1,200 turns of the recorded conversations. Where history must be kept in detail, as
under a template that carries state through it (Qwen3's with thoughts, GLM's, gpt-oss's), they are many: what that costs stands in the
second table.

Text that comes again is cheap (words, and whole bodies for a while), and in these benchmarks all of it does, as it does where a task
is sampled many times; what new bodies cost is said below the first table.
"""

OWN = "## The endpoint under load"
"""From here on the file holds what `benchmarks/endpoint.py` measured by itself: kept when the rest is written anew."""


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
        quick = " Run with --quick: fewer conversations, rounds and episodes." if asked.quick else ""
        about = f"Machine: {machine()}; load average {os.getloadavg()[0]:.1f} at the end.{quick}\n"
        before = asked.out.read_text() if asked.out.exists() else ""
        asked.out.write_text(document(about, texts, before))


def document(about: str, texts: list[str], before: str) -> str:
    """The file; of the text that was in it `before`, the section `OWN` stays."""
    kept = [OWN + before.partition(OWN)[2]] if OWN in before else []
    return "\n".join([INTRODUCTION, about, *texts, *kept])


if __name__ == "__main__":
    main()
