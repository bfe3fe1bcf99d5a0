"""A program that plays a run twice: once undisturbed, and once killed with SIGKILL many times and resumed after each kill.

`python -m support.killed_run FOLDER EPISODES KILLS SEED` writes FOLDER/whole and FOLDER/killed, and prints what happened as JSON.
Each run is a forked child with an engine of its own; everything is imported before the first fork, so a start costs milliseconds.

When a child is killed depends on the progress of the run, not on the clock: a random moment after the file has a given number of
lines. A child stops by itself, and waits for its kill, `SLACK` lines later. So no child can finish before its kill, however fast
or slow the machine is.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from support.episodes import agent, serving
from support.ponds import PondFactory, look

from toolroll.rollout.run_folder import RunFolder
from toolroll.rollout.runner import Runner, RunSettings
from toolroll.rollout.store import FILE_NAME
from toolroll.rollout.testing import load_embedded_tokenizer
from toolroll.rollout.types import Episode

SAMPLES = 2
PARAMS = {"temperature": 1.0, "max_new_tokens": 256}
SLACK = 4
"""Lines that a child may write after those that its kill waits for."""
START_UP = 0.25
"""A kill that waits for no new line comes within so many seconds: while the folder is opened, or in the first episodes."""


async def run(tokenizer: Any, folder: Path, episodes: int, most: int | None) -> None:
    """Play what is left of the run in `folder`; wait for a kill after `most` episodes."""
    factory = PondFactory(episodes // SAMPLES)
    written = 0
    with RunFolder(folder, factory.name, {"episodes": episodes}) as kept:

        def append(found: Episode) -> None:
            nonlocal written
            kept.append(found)
            written += 1
            while written == most:
                time.sleep(60)

        async with serving(tokenizer, look) as (_, served):
            runner = Runner(factory, lambda: agent(served, verify="sample"), RunSettings(PARAMS, samples=SAMPLES, concurrency=32))
            await runner.run(factory.tasks("test"), append, done=kept.done)


def start(tokenizer: Any, folder: Path, episodes: int, most: int | None = None) -> int:
    """The id of a child that plays."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        asyncio.run(run(tokenizer, folder, episodes, most))
        status = 0
    finally:
        os._exit(status)


def finish(child: int) -> None:
    """Wait for a child that nobody kills."""
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"a run ended with {status}"


def written(file: Path) -> int:
    """How many whole lines there are."""
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def kill_at(child: int, file: Path, lines: int, pause: float) -> None:
    """Kill the child `pause` seconds after there are `lines` lines."""
    while written(file) < lines:
        assert os.waitpid(child, os.WNOHANG)[0] == 0, "a run ended before its kill"
        time.sleep(0.001)
    time.sleep(pause)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WTERMSIG(status) == signal.SIGKILL, f"a run ended with {status} before its kill"


def main(folder: Path, episodes: int, kills: int, seed: int) -> None:
    """Play both runs and print what happened."""
    rng = random.Random(seed)
    tokenizer = load_embedded_tokenizer()
    finish(start(tokenizer, folder / "whole", episodes))
    torn, lines = 0, [0]
    file = folder / "killed" / FILE_NAME
    for stop in sorted(rng.choices(range(episodes - SLACK), k=kills)):
        soon = rng.random() < 0.25
        wanted = lines[-1] if soon else max(stop, lines[-1])
        child = start(tokenizer, folder / "killed", episodes, wanted + SLACK - lines[-1])
        kill_at(child, file, wanted, rng.uniform(0, START_UP if soon else 0.02))
        data = file.read_bytes() if file.is_file() else b""
        torn += bool(data) and not data.endswith(b"\n")
        lines.append(data.count(b"\n"))
    finish(start(tokenizer, folder / "killed", episodes))
    sys.stdout.write(json.dumps({"kills": len(lines) - 1, "torn": torn, "lines": lines[1:]}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
