"""A program that plays a run twice: once undisturbed, and once killed with SIGKILL at random moments and taken up again each time.

`python -m support.killed_run FOLDER EPISODES KILLS SEED` writes FOLDER/whole and FOLDER/killed, and prints how it went as JSON. Each
run is a forked child with an engine of its own; everything is imported before the first fork, so that a start costs milliseconds.
The moments are drawn so that the kills reach from the opening of the folder to some four fifths of the run.
"""

from __future__ import annotations

import asyncio
import json
import math
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

SAMPLES = 2
PARAMS = {"temperature": 1.0, "max_new_tokens": 256}


async def run(tokenizer: Any, folder: Path, episodes: int) -> None:
    """Play what is left of the run in `folder`."""
    factory = PondFactory(episodes // SAMPLES)
    with RunFolder(folder, factory.name, {"episodes": episodes}) as kept:
        async with serving(tokenizer, look) as (_, served):
            runner = Runner(factory, lambda: agent(served, verify="sample"), RunSettings(PARAMS, samples=SAMPLES, concurrency=32))
            await runner.run(factory.tasks("test"), kept.append, done=kept.done)


def start(tokenizer: Any, folder: Path, episodes: int) -> int:
    """The id of a child that plays."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        asyncio.run(run(tokenizer, folder, episodes))
        status = 0
    finally:
        os._exit(status)


def ended(child: int) -> bool:
    """Whether it ended by itself; killed otherwise."""
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        assert status == 0, f"a run ended with {status}"
        return True
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def undisturbed(tokenizer: Any, folder: Path, episodes: int) -> tuple[float, float]:
    """Seconds until the first line of a run, and from there to its end."""
    began = time.perf_counter()
    child = start(tokenizer, folder, episodes)
    file = folder / FILE_NAME
    while not (file.is_file() and file.stat().st_size) and time.perf_counter() < began + 60:
        time.sleep(0.002)
    first = time.perf_counter() - began
    assert os.waitpid(child, 0)[1] == 0
    return first, time.perf_counter() - began - first


def longest_delay(first: float, rest: float, kills: int) -> float:
    """So that `kills` delays, drawn evenly from 0 to it, leave 1.2 of a run's time behind its first line: a run that goes on is slower
    to begin than a new one."""
    share = 1.2 * rest / kills
    return float(first + share + math.sqrt(share**2 + 2 * share * first))


def main(folder: Path, episodes: int, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = load_embedded_tokenizer()
    first, rest = undisturbed(tokenizer, folder / "whole", episodes)
    longest = longest_delay(first, rest, kills)
    torn, lines = 0, [0]
    file = folder / "killed" / FILE_NAME
    while len(lines) <= kills:
        child = start(tokenizer, folder / "killed", episodes)
        time.sleep(rng.uniform(0, longest if lines[-1] < 0.8 * episodes else first))
        if ended(child):
            break
        data = file.read_bytes() if file.is_file() else b""
        torn += bool(data) and not data.endswith(b"\n")
        lines.append(data.count(b"\n"))
    assert os.waitpid(start(tokenizer, folder / "killed", episodes), 0)[1] == 0
    sys.stdout.write(json.dumps({"seconds": [first, rest], "kills": len(lines) - 1, "torn": torn, "lines": lines[1:]}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
