"""Play trials of a program, and kill the run with SIGKILL again and again.

`python -m support.killed_trials FOLDER KILLS` plays the run in FOLDER. Each start is killed later
than the one before: in its first request to the model, in its first command in a sandbox, in its
second request, and so on. The last start plays to the end. It prints what happened as JSON.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from support.episodes import call, serving
from support.killed_run import in_child
from support.program_trials import PARAMS, command_of, factory, program, write_task

from toolroll.environments.programs.sandbox import Sandbox
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.testing import PolicyRequest, load_embedded_tokenizer

MARKER = "98765431"
TURNS, MOMENTS = 4, 6
CHECK = 6
"""The number of commands that check the task's tests before the first trial."""
COMMAND = f"setsid sleep {MARKER} & {command_of()}"


Moment = tuple[str, int]
"""What the run does when it is killed, and how often it has done that before."""


class Killer:
    """Kills this process at `moment`."""

    def __init__(self, moment: Moment | None) -> None:
        self._moment = moment
        self._counts: Counter[str] = Counter()

    def reached(self, what: str) -> None:
        """The run is about to do `what`."""
        if (what, self._counts[what]) == self._moment:
            os.kill(os.getpid(), signal.SIGKILL)
        self._counts[what] += 1


async def run(tokenizer: Any, folder: Path, samples: int, killer: Killer) -> None:
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


def play(tokenizer: Any, folder: Path, samples: int, moment: Moment | None) -> None:
    killed = in_child(lambda: run(tokenizer, folder, samples, Killer(moment)))
    assert killed == (moment is not None)


def main(folder: Path, kills: int) -> None:
    write_task(folder / "tasks")
    tokenizer = load_embedded_tokenizer()
    samples, answers = 2 + kills // 4, 0
    for number in range(kills):
        later = number // 2 % MOMENTS
        answers += later % TURNS if number % 2 == 0 else 0  # of the killed trial
        moment = ("command", CHECK + later) if number % 2 else ("request", later)
        play(tokenizer, folder, samples, moment)
    play(tokenizer, folder, samples, None)
    sys.stdout.write(json.dumps({"answers": answers, "samples": samples}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
