"""Kill a run with SIGKILL again and again, and resume it each time. Print what happened as JSON.

`python -m support.killed_run episodes FOLDER EPISODES KILLS SEED` plays a run twice: undisturbed in
FOLDER/whole, and killed at random moments in FOLDER/killed. A moment is counted, not timed: a
number of function calls after the start of the run, or after it has started to write its next
episodes.

`python -m support.killed_run trials FOLDER KILLS` plays trials of a program in FOLDER. Each start
is killed later than the one before: in its first request to the model, in its first command in a
sandbox, in its second request, and so on. The last start plays to the end.

Each run is a forked child with its own engine; everything is imported before the first fork, so
that a start costs milliseconds.
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from support.episodes import agent, call, serving
from support.program_trials import PARAMS, command_of, factory, program, write_task
from support.toy_environment import PondFactory, look

from toolroll.environments.programs.sandbox import Sandbox
from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.episode_file import FILE_NAME
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.testing import PolicyRequest, load_embedded_tokenizer

SAMPLES = 2


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


def kill_episodes(folder: Path, episodes: int, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = load_embedded_tokenizer()
    assert not play(tokenizer, folder / "whole", episodes)
    lines = []
    file = folder / "killed" / FILE_NAME
    for _ in range(kills):
        moment = Moment(
            rng.randint(0, 3 * episodes // (2 * kills)),
            rng.randint(1, rng.choice((30, 300, 3_000))),
        )
        if not play(tokenizer, folder / "killed", episodes, moment):
            break
        data = file.read_bytes() if file.is_file() else b""
        lines.append(data.count(b"\n"))
    assert not play(tokenizer, folder / "killed", episodes)
    sys.stdout.write(json.dumps({"kills": len(lines), "lines": lines}) + "\n")


# --- trials ---------------------------------------------------------------------------------------

MARKER = "98765431"
TURNS, MOMENTS = 4, 6
CHECK = 6
"""The number of commands that check the task's tests before the first trial."""
COMMAND = f"setsid sleep {MARKER} & {command_of()}"


class Killer:
    """Kills this process at `moment`: what the run does then, and how often it has done that."""

    def __init__(self, moment: tuple[str, int] | None) -> None:
        self._moment = moment
        self._counts: Counter[str] = Counter()

    def reached(self, what: str) -> None:
        """The run is about to do `what`."""
        if (what, self._counts[what]) == self._moment:
            os.kill(os.getpid(), signal.SIGKILL)
        self._counts[what] += 1


async def run_trials(tokenizer: Any, folder: Path, samples: int, killer: Killer) -> None:
    def reply(request: PolicyRequest) -> str:
        killer.reached("request")
        turn = request.text.count("<|turn|>assistant")
        return call("bash", command="printf hello > greeting.txt") if turn < TURNS else "Done."

    do = Sandbox._do

    async def watched(sandbox: Sandbox, *words: str, **options: Any) -> int:
        killer.reached("command")
        return await do(sandbox, *words, **options)

    Sandbox._do = watched  # type: ignore[assignment, method-assign]
    tasks = factory(folder / "tasks")
    with RunDirectory(folder / "run", tasks.name, {}) as kept:
        async with serving(tokenizer, reply) as (_, model):
            agent = program(model, COMMAND, sessions=str(folder / "sessions"))
            settings = RunSettings(sampling_params=PARAMS, samples=samples, concurrency=1)
            runner = Runner(tasks, lambda: agent, settings)
            await runner.run(tasks.tasks("test"), kept.append, done=kept.done)


def kill_trials(folder: Path, kills: int) -> None:
    write_task(folder / "tasks")
    tokenizer = load_embedded_tokenizer()

    def play(moment: tuple[str, int] | None) -> None:
        killed = in_child(lambda: run_trials(tokenizer, folder, samples, Killer(moment)))
        assert killed == (moment is not None)

    samples, answers = 2 + kills // 4, 0
    for number in range(kills):
        later = number // 2 % MOMENTS
        answers += later % TURNS if number % 2 == 0 else 0  # of the killed trial
        moment = ("command", CHECK + later) if number % 2 else ("request", later)
        play(moment)
    play(None)
    sys.stdout.write(json.dumps({"answers": answers, "samples": samples}) + "\n")


if __name__ == "__main__":
    kind, folder, *numbers = sys.argv[1:]
    kill: Any = {"episodes": kill_episodes, "trials": kill_trials}[kind]
    kill(Path(folder), *map(int, numbers))
