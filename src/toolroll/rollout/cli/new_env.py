"""`toolroll new-env NAME`: writes a small working environment, as one file or as a package, for the
user to edit.

Invariant: the written files pass their own test and mypy --strict.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.registry import environment_names

FILE = '''\
"""@NAME@: a user asks to heat a room, and a tool sets its temperature.

Play it: toolroll run @FILE@:env --model MODEL
"""

from typing import Any

from toolroll import ActionError, tool_environment


class House:
    """The state of one episode: every episode has its own."""

    def __init__(self) -> None:
        self.rooms = {"kitchen": 18, "bath": 18}

    def set_temperature(self, room: str, degrees: int) -> str:
        """Set the temperature of a room."""
        if room not in self.rooms:  # the model's mistake: it gets this message and may retry
            raise ActionError(f"there is no room {room!r}; there are {', '.join(self.rooms)}")
        self.rooms[room] = degrees
        return "done"


def _task(room: str, degrees: int) -> dict[str, Any]:
    call = {"name": "set_temperature", "arguments": {"room": room, "degrees": degrees}}
    prompt = f"Please set the {room} to {degrees} degrees."
    return {"prompt": prompt, "wanted": [room, degrees], "reference": [call, "It is done."]}


def reward(task: dict[str, Any], state: House) -> float:
    """Return 1.0 if the room has the temperature that the task asks for."""
    room, degrees = task["wanted"]
    return float(state.rooms[room] == degrees)


TASKS = [_task("kitchen", 21), _task("bath", 23)]
env = tool_environment(tools=[House.set_temperature], tasks=TASKS, state=House, reward=reward)
'''
FILE_TEST = '''\
"""Tests of @FILE@: rewards, and what the model sees of its mistakes."""

import asyncio

from @PACKAGE@ import env
from toolroll.rollout.testing.play_episode import play_episode

TASKS = env.tasks("test")


def test_the_reference_solves_each_task() -> None:
    assert [asyncio.run(play_episode(env, task)).reward for task in TASKS] == [1.0] * len(TASKS)


def test_doing_nothing_earns_nothing() -> None:
    assert asyncio.run(play_episode(env, TASKS[0], ["Goodbye."])).reward == 0.0


def test_the_model_sees_its_mistake() -> None:
    call = '{"name": "set_temperature", "arguments": {"room": "attic", "degrees": 20}}'
    result = asyncio.run(play_episode(env, TASKS[0], [f"<tool_call>{call}</tool_call>", "Sorry."]))
    assert "there is no room 'attic'" in str(result.messages)
'''

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "@NAME@"
version = "0.1.0"
dependencies = ["toolroll"]

[project.entry-points."toolroll.environments"]
@NAME@ = "@PACKAGE@:@CONSTANT@"

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
"*" = ["py.typed"]
"""

ENVIRONMENT = '''\
"""@NAME@: a user asks to heat some rooms, and a tool sets their temperatures."""

from collections.abc import Sequence

from toolroll import (
    Action,
    ActionError,
    Environment,
    EnvironmentOptions,
    Observation,
    StepResult,
    Task,
    ToolCall,
)

TASKS = {
    "warm": {"kitchen": 21},
    "two-rooms": {"kitchen": 19, "bath": 23},
}
SET_TEMPERATURE = {
    "type": "function",
    "function": {
        "name": "set_temperature",
        "description": "Set the temperature of a room.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "string"}, "degrees": {"type": "integer"}},
            "required": ["room", "degrees"],
        },
    },
}


class @CLASS@(Environment):
    """One episode. Keep all state in the instance: many episodes run at the same time."""

    blocking = False  # nothing here waits; remove this line if `step` uses a database or a server

    def reset(self, task: Task, seed: int) -> Observation:
        self.wanted: dict[str, int] = task.data["wanted"]
        self.rooms = {"kitchen": 18, "bath": 18}
        wishes = [f"the {room} at {degrees} degrees" for room, degrees in self.wanted.items()]
        system = "You look after the heating. Answer once it is done."
        user = f"I would like {' and '.join(wishes)}."
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return Observation(messages, tools=[SET_TEMPERATURE])

    def step(self, action: Action) -> StepResult:
        if not action.tool_calls:  # the reply ends the episode
            done = all(self.rooms[room] == degrees for room, degrees in self.wanted.items())
            return StepResult(reward=float(done), done=True)
        return StepResult(
            [
                {"role": "tool", "tool_call_id": call.id, "content": self.call(call)}
                for call in action.tool_calls
            ]
        )

    def call(self, call: ToolCall) -> str:
        arguments = call.arguments or {}
        room, degrees = arguments.get("room"), arguments.get("degrees")
        if room not in self.rooms:  # the model's mistake: it gets this message and may retry
            raise ActionError(f"there is no room {room!r}; there are {', '.join(self.rooms)}")
        if not isinstance(degrees, int):
            raise ActionError("degrees must be an integer")
        self.rooms[room] = degrees
        return "done"


class @CLASS@Factory:
    """Name the environment, list its tasks, and make new instances."""

    name = "@NAME@"
    description = "Set rooms to temperatures."
    splits: tuple[str, ...] = ("test",)

    def missing(self) -> str | None:
        return None

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(name, index, split, {"wanted": wanted})
            for index, (name, wanted) in enumerate(TASKS.items())
        ]

    def make(self, options: EnvironmentOptions) -> @CLASS@:
        return @CLASS@()

    def reference(self, task: Task) -> Sequence[Action]:
        wanted = task.data["wanted"].items()
        calls = [
            ToolCall("set_temperature", {"room": room, "degrees": degrees}, "")
            for room, degrees in wanted
        ]
        return [*(Action("", (call,)) for call in calls), Action("It is done.")]


@CONSTANT@ = @CLASS@Factory()
'''

TEST = '''\
"""Whole episodes: the reference actions earn 1.0, doing nothing earns 0.0, and the model sees its
mistakes.
"""

import asyncio

import pytest

from toolroll import InteractionResult, Task, load_environment
from toolroll.rollout.testing.play_episode import play_episode
from @PACKAGE@ import @CONSTANT@

TASKS = @CONSTANT@.tasks("test")


def play(task: Task, *replies: str) -> InteractionResult:
    return asyncio.run(play_episode(@CONSTANT@, task, replies or None))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_the_reference_actions_solve_each_task(task: Task) -> None:
    result = play(task)
    assert (result.reward, result.status.value) == (1.0, "completed")
    assert result.trajectories[0].trained_tokens > 0


def test_doing_nothing_earns_nothing() -> None:
    assert play(TASKS[0], "Goodbye.").reward == 0.0


def test_the_model_sees_its_mistake() -> None:
    call = '{"name": "set_temperature", "arguments": {"room": "attic", "degrees": 20}}'
    result = play(TASKS[0], f"<tool_call>{call}</tool_call>", "Sorry.")
    assert "there is no room 'attic'" in str(result.messages[3]["content"])


def test_it_is_known_by_name() -> None:
    assert load_environment("@NAME@") is @CONSTANT@
'''


def new_env(name: str, at: Path) -> Path:
    """Write an environment and its test as two files in the folder `at`. Return the environment's
    path. Raise `UsageError` if one of the files already exists.
    """
    package = _package(name)
    files = {at / f"{package}.py": FILE, at / f"test_{package}.py": FILE_TEST}
    _write(files, name, files)
    return at / f"{package}.py"


def new_package(name: str, at: Path) -> Path:
    """Write the package `name`, with an entry point, into the folder `at / name`. Return this
    folder. Raise `UsageError` if it already exists.
    """
    package, folder = _package(name), at / name
    files = {
        folder / "pyproject.toml": PYPROJECT,
        folder / f"src/{package}/__init__.py": ENVIRONMENT,
        folder / f"src/{package}/py.typed": "",
        folder / f"tests/test_{package}.py": TEST,
    }
    _write(files, name, [folder])
    return folder


def _write(files: Mapping[Path, str], name: str, not_there: Iterable[Path]) -> None:
    for path in not_there:
        if path.exists():
            raise UsageError(f"{path} already exists")
    package = _package(name)
    _check_free(name, package)
    words = {
        "@NAME@": name,
        "@PACKAGE@": package,
        "@FILE@": f"{package}.py",
        "@CLASS@": "".join(part.capitalize() for part in name.split("-")),
        "@CONSTANT@": package.upper(),
    }
    for file, text in files.items():
        for mark, word in words.items():
            text = text.replace(mark, word)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--at: {file} cannot be written: {error.strerror}") from error


def _package(name: str) -> str:
    """Return the name of the Python module for the environment `name`. Raise `UsageError` if
    `name` is not valid.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UsageError(
            f"{name!r} cannot be the name of an environment: use lowercase letters, digits and "
            f"single hyphens, as in my-bench"
        )
    return name.replace("-", "_")


def _check_free(name: str, package: str) -> None:
    if (
        keyword.iskeyword(package)
        or package in sys.stdlib_module_names
        or find_spec(package) is not None
    ):
        raise UsageError(
            f"{package!r} is a Python keyword or an existing module: choose another name"
        )
    if name in environment_names():
        raise UsageError(f"an environment named {name!r} already exists (toolroll envs lists them)")
