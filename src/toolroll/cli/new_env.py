"""`toolroll new-env NAME`: writes a small working environment and its test, for the user to edit.

Invariant: the written files pass their own test and mypy --strict.
"""

from __future__ import annotations

import keyword
import re
import sys
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
from toolroll.testing import play_episode

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


def new_env(name: str, folder: Path) -> Path:
    """Write an environment and its test as two files in `folder`. Return the environment's path.

    Raise `UsageError` if `name` is not valid, or if one of the files already exists.
    """
    module = _module_name(name)
    file = folder / f"{module}.py"
    texts = {file: FILE, folder / f"test_{module}.py": FILE_TEST}
    for path in texts:
        if path.exists():
            raise UsageError(f"{path} already exists")
    _check_free(name, module)
    for path, text in texts.items():
        for mark, value in {"@NAME@": name, "@PACKAGE@": module, "@FILE@": file.name}.items():
            text = text.replace(mark, value)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--at: {path} cannot be written: {error.strerror}") from error
    return file


def _module_name(name: str) -> str:
    """Return the name of the Python module for the environment `name`. Raise `UsageError` if
    `name` is not valid.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UsageError(
            f"{name!r} cannot be the name of an environment: use lowercase letters, digits and "
            f"single hyphens, as in my-bench"
        )
    return name.replace("-", "_")


def _check_free(name: str, module: str) -> None:
    if (
        keyword.iskeyword(module)
        or module in sys.stdlib_module_names
        or find_spec(module) is not None
    ):
        raise UsageError(
            f"{module!r} is a Python keyword or an existing module: choose another name"
        )
    if name in environment_names():
        raise UsageError(f"an environment named {name!r} already exists (toolroll envs lists them)")
