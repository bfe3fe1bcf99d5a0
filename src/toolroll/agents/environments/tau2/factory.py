"""The environments `tau2/airline`, `tau2/retail` and `tau2/telecom`.

Invariants: the wheel is read once, when it is first needed. The task ids are tau2's own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from toolroll.agents.environments.factory import Factory
from toolroll.agents.environments.tau2.domain import Domain, load_domain
from toolroll.agents.environments.tau2.environment import Tau2Environment
from toolroll.agents.environments.tau2.package import INSTALL, data_folder
from toolroll.agents.environments.tau2.reference import reference
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import Action, EnvironmentOptions, Task

_THREADS = 2  # copies and hashes hold the GIL: more threads are not faster


class Tau2Factory(Factory):
    """The factory of one domain of tau2 (airline, retail or telecom)."""

    packages = ("inspect-evals",)

    def __init__(self, domain: str, splits: tuple[str, ...], description: str) -> None:
        self.name = f"tau2/{domain}"
        self.description = description
        self.splits = splits
        self._domain_name = domain
        self._domain: Domain | None = None
        self._threads = Threads(_THREADS)
        self._lock = threading.Lock()

    def missing(self) -> str | None:
        """Return the command that installs the wheel without its dependencies, which are not needed
        here. Return None if the wheel is installed.
        """
        return None if data_folder() is not None else INSTALL

    @property
    def domain(self) -> Domain:
        """The domain's data, which all episodes share. It is loaded when it is first needed."""
        with self._lock:
            if self._domain is None:
                self._domain = load_domain(self._domain_name)
            return self._domain

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `split` in tau2's order. Their data is tau2's own."""
        self.check_split(split)
        wanted = set(self.domain.splits[split])
        found = [task for task in self.domain.tasks if task["id"] in wanted]
        return [Task(str(task["id"]), index, split, task) for index, task in enumerate(found)]

    def make(self, options: EnvironmentOptions) -> Tau2Environment:
        """Return a new environment. Raise `UsageError` for any setting, or if there is no user
        simulator.
        """
        self.check_settings(options)
        make_user = self.needed_user(options)
        return Tau2Environment(self.domain, make_user, self._threads)

    def reference(self, task: Task) -> Sequence[Action]:
        """Return the agent's reference actions. `ReferenceUser` executes the user's actions."""
        return reference(task.data)


AIRLINE = Tau2Factory(
    "airline",
    ("base", "train", "test"),
    "tau2-bench airline: bookings and changes; a model plays the user",
)
RETAIL = Tau2Factory(
    "retail",
    ("base", "train", "test"),
    "tau2-bench retail: orders, returns and exchanges; a model plays the user",
)
TELECOM = Tau2Factory(
    "telecom",
    ("base", "train", "test", "small", "full"),
    "tau2-bench telecom: a phone is out of order; the user has tools too",
)
