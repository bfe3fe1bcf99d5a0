"""`EnvironmentClass`: makes an `EnvironmentFactory` from an `Environment` class."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from toolroll.rollout.environment import Action, Environment, EnvironmentOptions, Task
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.signature import Signature

SPLIT = "test"


class EnvironmentClass:
    """The factory for the class `kind`, whose constructor gets `arguments`.

    `kind.tasks` is optional. It is a list of `Task`s or of dicts (their `data`), or a static or
    class method that returns such a list, and may have parameters of the constructor. Without
    `kind.tasks`, there is one task without data, whose episodes differ only in their seed.
    `kind.reference(task)` is optional. It is a static or class method that returns the actions that
    solve a task. If the constructor has a parameter `options`, the run's `EnvironmentOptions` are
    passed to this parameter.

    Raises `UsageError` if the constructor does not accept `arguments`.
    """

    splits: tuple[str, ...] = (SPLIT,)

    def __init__(
        self, kind: type[Environment], name: str, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.kind = kind
        self.name = name
        self.description = next(iter((kind.__doc__ or "").strip().splitlines()), "")
        if inspect.isabstract(kind):
            missing = ", ".join(sorted(kind.__abstractmethods__))
            raise UsageError(f"{name} cannot be played: {kind.__name__} has no {missing}")
        self._with_options = "options" in Signature(kind).names
        self._signature = Signature(kind, skip=("options",) if self._with_options else ())
        self._arguments = dict(arguments or {})
        with env_args_of(name):
            self._signature.checked(self._arguments)

    def missing(self) -> str | None:
        """Return None. The class could be imported, so nothing is missing."""
        return None

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of the class. Raises `UsageError` for an unknown split."""
        if split != SPLIT:
            raise UsageError(f"{self.name} has no split {split!r}; it has {SPLIT}")
        declared: Any = getattr(self.kind, "tasks", None)
        if declared is None:
            return [Task("0", 0, split)]
        if inspect.isfunction(inspect.getattr_static(self.kind, "tasks")):
            raise UsageError(f"{self.name}: tasks must be a list, or a static or class method")
        listed: Any = declared(**self._taken(declared)) if callable(declared) else declared
        return [self._task(index, task, split) for index, task in enumerate(list(listed))]

    def _taken(self, function: Any) -> dict[str, Any]:
        names = inspect.signature(function).parameters
        return {name: value for name, value in self._arguments.items() if name in names}

    def make(self, options: EnvironmentOptions) -> Environment:
        """Return a new environment. `options.settings` override the arguments."""
        with env_args_of(self.name):
            arguments = self._signature.checked({**self._arguments, **options.settings})
        if self._with_options:
            arguments["options"] = options
        return self.kind(**arguments)

    def reference(self, task: Task) -> Sequence[Action] | None:
        """Return the actions that solve `task`, or None if the class has no `reference`."""
        function: Any = getattr(self.kind, "reference", None)
        actions: Sequence[Action] | None = None if function is None else function(task)
        return actions

    def _task(self, index: int, task: Any, split: str) -> Task:
        if isinstance(task, Task):
            return task
        if not isinstance(task, Mapping):
            raise UsageError(
                f"{self.name}: tasks[{index}] must be a Task or a dict, not {type(task).__name__}"
            )
        return Task(str(task.get("id", index)), index, split, dict(task))


@contextmanager
def env_args_of(name: str) -> Iterator[None]:
    """Let a `UsageError` about the arguments of the environment `name` name the option."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"--env-args of {name}: {error}") from error
