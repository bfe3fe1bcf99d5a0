"""Find environments by name (through entry points `toolroll.environments`, which other packages can
add), in a file (`path/to/file.py:NAME`) or in a module (`package.module:NAME`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from toolroll.rollout.environment import Environment, EnvironmentFactory, EnvironmentOptions, Task
from toolroll.rollout.errors import ToolrollError, UsageError
from toolroll.rollout.runs.environment_class import EnvironmentClass, env_args_of
from toolroll.rollout.runtime.complaints import did_you_mean
from toolroll.rollout.runtime.signature import Signature
from toolroll.rollout.runtime.targets import error_line, is_target, load_target

GROUP = "toolroll.environments"
_PARTS = ("tasks", "make", "missing", "reference", "splits")
"""The attributes of an `EnvironmentFactory`."""


def environment_names() -> list[str]:
    """Return the names of all entry points, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load_environment(name: str, env_args: Mapping[str, Any] | None = None) -> EnvironmentFactory:
    """Return the environment `name`, ready to be played. The arguments are the same as for
    `find_environment`.

    Raises `UsageError` in the same cases as `find_environment`, and if a package that the
    environment needs is not installed.

    Example:
        >>> load_environment("desk").tasks("test")[0].id
        'renew-one'
    """
    factory = find_environment(name, env_args)
    command = factory.missing()
    if command is not None:
        raise UsageError(f"the environment {name} needs a package that is not installed: {command}")
    return factory


def find_environment(name: str, env_args: Mapping[str, Any] | None = None) -> EnvironmentFactory:
    """Return the environment `name`, even if packages that it needs are not installed.

    `name` is the name of an entry point, `path/to/file.py:NAME` or `package.module:NAME`. NAME is
    an `EnvironmentFactory` (`tool_environment` makes one), a class or function that makes one, or
    an `Environment` class. `env_args` are the arguments of this class or function. If NAME is a
    factory object, they become `EnvironmentOptions.settings`.

    Raise `UsageError` if there is no such environment, or if `env_args` are not valid for it.
    """
    arguments = dict(env_args or {})
    if is_target(name):
        target, short = load_target(name)
        return _factory_of(target, name, short, arguments)
    how = "; toolroll envs lists all names; name your own as path/to/file.py:NAME"
    return _factory_of(_by_name(GROUP, name, "environment", how), name, name, arguments)


def environment_file(name: str) -> Path | None:
    """Return the file that the environment `name` was loaded from. None if it is not a file."""
    source = name.rpartition(":")[0]
    if not is_target(name):
        source = next(entry.module for entry in entry_points(group=GROUP) if entry.name == name)
    elif source.endswith(".py"):
        return Path(source).resolve()
    file = getattr(sys.modules.get(source), "__file__", None)
    return Path(file).resolve() if file else None


def _factory_of(
    loaded: Any, target: str, short: str, arguments: Mapping[str, Any]
) -> EnvironmentFactory:
    """Return `loaded` as a factory. If it has no name, its name is `short`."""
    if isinstance(loaded, type) and issubclass(loaded, Environment):
        return EnvironmentClass(loaded, short, arguments)
    result = loaded
    if callable(loaded) and (isinstance(loaded, type) or not _is_factory(loaded)):
        result = _called(loaded, target, arguments)
    if not _is_factory(result):
        kind = type(result).__name__
        raise UsageError(
            f"{target} is not an environment: it {'is' if result is loaded else 'makes'} an object "
            f"of type {kind}; name an Environment class, what tool_environment() returned, or an "
            f"EnvironmentFactory (with {', '.join(_PARTS)})"
        )
    if not getattr(result, "name", ""):
        result.name = short
    factory = cast(EnvironmentFactory, result)
    return _Configured(factory, arguments) if result is loaded and arguments else factory


def _is_factory(value: Any) -> bool:
    return all(getattr(value, part, None) is not None for part in _PARTS)


def _called(function: Any, target: str, arguments: Mapping[str, Any]) -> Any:
    with env_args_of(target):
        checked = Signature(function).checked(arguments)
    try:
        return function(**checked)
    except (Exception, SystemExit) as error:
        if isinstance(error, ToolrollError):
            raise
        raise UsageError(
            f"{target} raised an error when it was called: {error_line(error)}"
        ) from error


class _Configured:
    """A factory that passes `settings` to every environment that it makes."""

    def __init__(self, factory: EnvironmentFactory, settings: Mapping[str, Any]) -> None:
        self.name = factory.name
        self.description = factory.description
        self.splits = factory.splits
        self.missing = factory.missing
        self.tasks = factory.tasks
        self.reference = factory.reference
        self.packages = getattr(factory, "packages", ())
        self.sources = getattr(factory, "sources", {})
        self._factory = factory
        self._settings = settings
        if check := getattr(factory, "check_settings", None):
            check(settings)

    def make(self, options: EnvironmentOptions) -> Environment:
        settings = {**self._settings, **options.settings}
        return self._factory.make(replace(options, settings=settings))


def check_env_args(factory: EnvironmentFactory, options: EnvironmentOptions) -> None:
    """Raise `UsageError` if `factory` makes no environment with its arguments and `options`."""
    try:
        factory.make(options)  # `close` releases what `reset` has made: nothing
    except Exception as error:  # of the environment's own code
        if isinstance(error, ToolrollError):
            raise
        raise UsageError(f"--env-args of {factory.name}: {error_line(error)}") from error


def check_split(factory: EnvironmentFactory, split: str) -> None:
    """Raise `UsageError` if `factory` has no such split."""
    if split not in factory.splits:
        raise UsageError(
            f"{factory.name} has no split {split!r}; it has {', '.join(factory.splits)}"
        )


def choose_tasks(factory: EnvironmentFactory, split: str | None, numbers: str | None) -> list[Task]:
    """Return the tasks of `split` (default: the first split) that `numbers` selects.

    `numbers` is "3", "0-9" or "0-4,7". None selects all tasks. Raise `UsageError` for an unknown
    split, a split without tasks, a task out of range, or a range that cannot be read.
    """
    split = split or factory.splits[0]
    check_split(factory, split)
    try:
        tasks = list(factory.tasks(split))
    except Exception as error:
        if isinstance(error, ToolrollError):
            raise
        raise UsageError(f"{factory.name}: tasks({split!r}) failed: {error_line(error)}") from error
    if not tasks:
        raise UsageError(f"{factory.name} has no tasks in the split {split}")
    if numbers is None:
        return tasks
    chosen: list[Task] = []
    for part in numbers.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(
                f"--tasks {numbers!r}: {part!r} is neither a number nor a range such as 0-9"
            )
        if dash and int(last) < int(first):
            raise UsageError(
                f"--tasks {numbers!r}: {part.strip()!r} is an empty range; did you mean "
                f"{last}-{first}?"
            )
        for index in range(int(first), int(last or first) + 1):
            if index >= len(tasks):
                raise UsageError(
                    f"--tasks {numbers!r}: {factory.name} ({split}) has tasks 0 to {len(tasks) - 1}"
                )
            chosen.append(tasks[index])
    return list({task.id: task for task in chosen}.values())


AGENTS = "toolroll.agents"
USERS = "toolroll.users"


def agent_maker(name: str) -> Any:
    """Return the function `(model, settings) -> Agent` with this name. Raise `UsageError` if the
    name is unknown.
    """
    return _by_name(AGENTS, name, "agent")


def user_maker(name: str) -> Any:
    """Return the factory of user simulators with this name. Raise `UsageError` if it is unknown."""
    return _by_name(USERS, name, "user simulator")


def _by_name(group: str, name: str, kind: str, otherwise: str = "") -> Any:
    """Return the object of the entry point `name`. If it is unknown, raise `UsageError` with a
    similar name, or with `otherwise` if there is none (default: all names).
    """
    entries = {entry.name: entry for entry in entry_points(group=group)}
    if name not in entries:
        otherwise = otherwise or f"; there are {', '.join(sorted(entries)) or 'none'}"
        hint = did_you_mean(name, entries, otherwise)
        raise UsageError(f"there is no {kind} named {name!r}{hint}")
    return entries[name].load()
