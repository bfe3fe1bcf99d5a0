"""Play a run twice: once undisturbed, and once killed with SIGKILL at random moments and resumed
each time.

`python -m support.killed_run FOLDER EPISODES KILLS SEED` writes FOLDER/whole and FOLDER/killed, and
prints the result as JSON. Each run is a forked child with its own engine; everything is imported
before the first fork, so that a start costs milliseconds. A moment is counted, not timed: a number
of function calls after the start of the run, or after it has started to write its next episodes.
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from support.episodes import agent, serving
from support.toy_environment import PondFactory, look

from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.episode_file import FILE_NAME
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.testing import load_embedded_tokenizer

SAMPLES = 2
PARAMS = {"temperature": 1.0, "max_new_tokens": 256}


@dataclass
class Moment:
    """`calls` calls after a run has begun to write its `episodes`-th episode (0: its start)."""

    episodes: int
    calls: int

    def begin(self) -> None:
        if self.episodes == 0:
            sys.setprofile(self._count)

    def write(self) -> None:
        self.episodes -= 1
        if self.episodes == 0:
            sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls -= 1
        if self.calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)


NEVER = Moment(-1, 0)


async def run(tokenizer: Any, folder: Path, episodes: int, moment: Moment) -> None:
    """Play what is left of the run in `folder`."""
    factory = PondFactory(episodes // SAMPLES)
    moment.begin()
    with RunDirectory(folder, factory.name, {"episodes": episodes}) as kept:

        def keep(episode: Episode) -> None:
            moment.write()
            kept.append(episode)

        async with serving(tokenizer, look) as (_, served):
            runner = Runner(
                factory,
                lambda: agent(served, verify="sample"),
                RunSettings(sampling_params=PARAMS, samples=SAMPLES, concurrency=32),
            )
            await runner.run(factory.tasks("test"), keep, done=kept.done)


def in_child(work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Do `work` in a forked child; return whether it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            asyncio.run(work())
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"a run ended with {status}"
    return status != 0


def play(tokenizer: Any, folder: Path, episodes: int, moment: Moment = NEVER) -> bool:
    """Play in a child; return whether it was killed."""
    return in_child(lambda: run(tokenizer, folder, episodes, moment))


def main(folder: Path, episodes: int, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = load_embedded_tokenizer()
    assert not play(tokenizer, folder / "whole", episodes)
    torn, lines = 0, []
    file = folder / "killed" / FILE_NAME
    for _ in range(kills):
        moment = Moment(
            rng.randint(0, 3 * episodes // (2 * kills)),
            rng.randint(1, rng.choice((30, 300, 3_000))),
        )
        if not play(tokenizer, folder / "killed", episodes, moment):
            break
        data = file.read_bytes() if file.is_file() else b""
        torn += bool(data) and not data.endswith(b"\n")
        lines.append(data.count(b"\n"))
    assert not play(tokenizer, folder / "killed", episodes)
    sys.stdout.write(json.dumps({"kills": len(lines), "torn": torn, "lines": lines}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
