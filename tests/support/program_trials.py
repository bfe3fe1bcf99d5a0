"""Harbor tasks, a small program that plays them, and its replies."""

import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from support.episodes import call

from toolroll.environments.harbor import HarborTask
from toolroll.environments.programs.agent import ProgramAgent, make_program_agent
from toolroll.rollout.episode import Agent, Episode
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.environment_class import EnvironmentClass
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings

TOML = """\
schema_version = "1.4"
[task]
name = "test/{name}"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
[environment]
{image}
"""
TEST = 'if [ "$(cat greeting.txt)" = "hello" ]; then echo 1; else echo 0; fi > {reward}\n'
REWARD = "/logs/verifier/reward.txt"
AGENT = Path(__file__).with_name("program_agent.py")
WRITE = "printf hello > greeting.txt"
PARAMS = {"temperature": 1.0, "max_new_tokens": 256}


def write_task(folder: Path, name: str = "greet", *, test: str = "", image: str = "") -> Path:
    """Write the folder of a task: write a greeting to a file."""
    task = folder / name
    for part in ("environment", "tests", "solution"):
        (task / part).mkdir(parents=True)
    (task / "task.toml").write_text(TOML.format(name=name, image=image))
    (task / "instruction.md").write_text("Write hello to greeting.txt.\n")
    (task / "environment" / "notes.txt").write_text("A note.\n")
    (task / "tests" / "test.sh").write_text("#!/bin/bash\n" + (test or TEST.format(reward=REWARD)))
    (task / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{WRITE}\n")
    return task


def replies(command: str = WRITE) -> list[str]:
    """The model's replies: one call, then an answer."""
    return [call("bash", command=command), "Done."]


def command_of(file: Path = AGENT) -> str:
    """The command that runs the program in `file`, which a sandbox may not see."""
    return shlex.join([sys.executable, "-c", file.read_text()])


def program(model: Model, command: str | None = None, **settings: Any) -> ProgramAgent:
    return make_program_agent(model, {"command": command or command_of(), **settings})


def factory(folder: Path, **options: Any) -> EnvironmentClass:
    return EnvironmentClass(HarborTask, "harbor", {"path": str(folder), **options})


async def play(
    tasks: EnvironmentClass, agent: Agent, **settings: Any
) -> dict[tuple[str, int], Episode]:
    """Play all `tasks`, and return the episodes by task and sample."""
    played: dict[tuple[str, int], Episode] = {}

    def keep(episode: Episode) -> None:
        played[episode.task_id, episode.sample] = episode

    runner = Runner(tasks, lambda: agent, RunSettings(**{"sampling_params": PARAMS, **settings}))
    await runner.run(tasks.tasks("test"), keep)
    return played


def processes_of(word: str) -> list[str]:
    lines = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in lines.stdout.splitlines() if word in line]


@cache
def refusal() -> str:
    """Why this machine cannot make sandboxes, or an empty string."""
    if shutil.which("bwrap") is None:
        return "no bwrap: install the package bubblewrap"
    words = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""
