"""Environments by name, through the entry-point group `toolroll.environments`: a third party
adds a benchmark without touching us.
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import EnvironmentFactory, Task

GROUP = "toolroll.environments"


def environment_names() -> list[str]:
    """All names, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load_environment(name: str) -> EnvironmentFactory:
    """The factory of that name. Raises `UsageError` for an unknown name, or where what it needs
    is not installed.
    """
    factory = find_environment(name)
    command = factory.missing()
    if command is not None:
        raise UsageError(f"the environment {name} needs a package that is not installed: {command}")
    return factory


def find_environment(name: str) -> EnvironmentFactory:
    """The factory of that name, whether or not what it needs is installed."""
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in entries:
        close = difflib.get_close_matches(name, entries, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"there is no environment named {name!r}{hint} (toolroll envs lists them)")
    return _loaded(entries[name])


def _loaded(entry: EntryPoint) -> EnvironmentFactory:
    found: Any = entry.load()
    factory: EnvironmentFactory = found() if isinstance(found, type) else found
    return factory


def choose_tasks(factory: EnvironmentFactory, split: str | None, wanted: str | None) -> list[Task]:
    """The tasks of `split` (default: the first one) that `wanted` names: "3", "0-9", "0-4,7"; None
    for all of them.

    Raises `UsageError` for an unknown split, a task out of range, or a range that cannot be read.
    """
    split = split or factory.splits[0]
    if split not in factory.splits:
        raise UsageError(
            f"{factory.name} has no split {split!r}; it has {', '.join(factory.splits)}"
        )
    tasks = list(factory.tasks(split))
    if wanted is None:
        return tasks
    chosen: list[Task] = []
    for part in wanted.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"--tasks {wanted!r}: {part!r} is no number and no range such as 0-9")
        if dash and int(last) < int(first):
            raise UsageError(
                f"--tasks {wanted!r}: {part.strip()!r} is an empty range; {last}-{first} is meant?"
            )
        for index in range(int(first), int(last or first) + 1):
            if index >= len(tasks):
                raise UsageError(
                    f"--tasks {wanted!r}: {factory.name} ({split}) has tasks 0 to {len(tasks) - 1}"
                )
            chosen.append(tasks[index])
    return list({task.id: task for task in chosen}.values())


AGENTS = "toolroll.agents"
USERS = "toolroll.users"


def agent_maker(name: str) -> Any:
    """The function `(served, settings) -> Agent` of that name (entry-point group
    `toolroll.agents`).
    """
    return _by_name(AGENTS, name, "agent")


def user_maker(name: str) -> Any:
    """The factory of user simulators of that name (entry-point group `toolroll.users`)."""
    return _by_name(USERS, name, "user simulator")


def _by_name(group: str, name: str, what: str) -> Any:
    entries = {entry.name: entry for entry in entry_points(group=group)}
    if name not in entries:
        raise UsageError(
            f"there is no {what} named {name!r}; there are {', '.join(sorted(entries)) or 'none'}"
        )
    return entries[name].load()
