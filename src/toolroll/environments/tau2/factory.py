"""The environments `tau2/airline`, `tau2/retail` and `tau2/telecom`, and the agent's reference
actions.

Invariants: the data are read once, when they are first needed. The task ids are tau2's own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Literal

from toolroll.agents.environments.factory import Factory
from toolroll.environments.tau2.domain import Tau2Domain, load_domain
from toolroll.environments.tau2.environment import Tau2Environment
from toolroll.environments.tau2.package import INSTALL, Data, data_folder, default_data
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import Action, EnvironmentOptions, Task
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.threads import Threads

_FAREWELL = "That is everything I can do for you. Goodbye."


def action_groups(task: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the reference actions in order. Consecutive actions of one side are one group."""
    actions = (task.get("evaluation_criteria") or {}).get("actions") or ()
    return [
        (side, list(group))
        for side, group in groupby(
            actions, key=lambda action: action.get("requestor") or "assistant"
        )
    ]


def reference(task: Mapping[str, Any]) -> list[Action]:
    """Return the agent's actions: its calls (one per step), its requests to the user, and a last
    line with the texts that the task requires.
    """
    steps: list[Action] = []
    for side, group in action_groups(task):
        if side == "assistant":
            steps += [
                Action("", (ToolCall(action["name"], dict(action["arguments"]), ""),))
                for action in group
            ]
        else:
            requests = "; ".join(
                f"{action['name']} {json.dumps(action['arguments'])}" for action in group
            )
            steps.append(Action(f"Please do this on your phone: {requests}"))
    texts = (task.get("evaluation_criteria") or {}).get("communicate_info") or ()
    outputs = f"You asked for: {'; '.join(map(str, texts))}. " if texts else ""
    return [*steps, Action(outputs + _FAREWELL)]


_THREADS = 2  # copies and hashes hold the GIL: more threads are not faster


class Tau2Factory(Factory):
    """The factory of one domain of tau2 (airline, retail or telecom).

    `data` is the path of a checkout of tau2-bench, or of its folder `data`. None reads the wheel's
    data. `nl_assertions="skip"` leaves out the part of the reward that needs a judge model.
    """

    packages = ("inspect-evals",)

    def __init__(
        self,
        domain: str,
        data: str | None = None,
        nl_assertions: Literal["skip"] | None = None,
    ) -> None:
        self.name = f"tau2/{domain}"
        self.splits = _SPLITS[domain]
        self.description = f"tau2-bench {domain}: {_DESCRIPTIONS[domain]}" + (
            f" (data: {data})" if data else ""
        )
        self._domain_name = domain
        self._data = data
        self._nl_assertions = nl_assertions
        self._domain: Tau2Domain | None = None
        self._threads = Threads(_THREADS)
        self._lock = threading.Lock()

    def missing(self) -> str | None:
        """Return the command that installs the wheel without its dependencies, which are not needed
        here. Return None if the wheel is installed.
        """
        return None if data_folder() is not None else INSTALL

    @property
    def domain(self) -> Tau2Domain:
        """The domain's data, which all episodes share. It is loaded when it is first needed."""
        with self._lock:
            if self._domain is None:
                self._domain = load_domain(self._domain_name, Data(self._data))
            return self._domain

    @property
    def sources(self) -> Mapping[str, str]:
        """The commit of tau2-bench that the data come from."""
        return {"tau2-bench": self.domain.revision}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `split` in tau2's order. Their data is tau2's own."""
        self.check_split(split)
        ids = set(self.domain.splits[split])
        selected = [task for task in self.domain.tasks if task["id"] in ids]
        return [Task(str(task["id"]), index, split, task) for index, task in enumerate(selected)]

    def make(self, options: EnvironmentOptions) -> Tau2Environment:
        """Return a new environment. Raise `UsageError` for any setting, if there is no user
        simulator, or if the reward of a task needs a judge model and `nl_assertions` is None.
        """
        self.check_settings(options.settings)
        make_user = self.needed_user(options)
        info = {"data": f"tau2-bench {self.domain.revision}"}
        judged = self.domain.judged
        if judged and self._nl_assertions is None:
            raise UsageError(
                f"{self.name}: the reward of {judged} of {len(self.domain.tasks)} tasks needs a "
                "judge model (NL_ASSERTION), which toolroll does not have; "
                'nl_assertions="skip" leaves this part of the reward out '
                '(--env-args \'{"nl_assertions": "skip"}\')'
            )
        if judged:
            info["nl_assertions"] = "skipped"
        return Tau2Environment(self.domain, make_user, self._threads, info)

    def reference(self, task: Task) -> Sequence[Action]:
        """Return the agent's reference actions, and its requests for the user's actions."""
        return reference(task.data)


_SPLITS = {
    "airline": ("base", "train", "test"),
    "retail": ("base", "train", "test"),
    "telecom": ("base", "train", "test", "small", "full"),
}
_DESCRIPTIONS = {
    "airline": "bookings and changes; a model plays the user",
    "retail": "orders, returns and exchanges; a model plays the user",
    "telecom": "a phone is out of order; the user has tools too",
}


def airline(data: str | None = None, nl_assertions: Literal["skip"] | None = None) -> Tau2Factory:
    """Return the factory of `tau2/airline`. The arguments are as for `Tau2Factory`; the default of
    `data` is the environment variable `TAU2_DATA_DIR`.
    """
    return _factory("airline", data or default_data(), nl_assertions)


def retail(data: str | None = None, nl_assertions: Literal["skip"] | None = None) -> Tau2Factory:
    """Return the factory of `tau2/retail`. The arguments are as for `airline`."""
    return _factory("retail", data or default_data(), nl_assertions)


def telecom(data: str | None = None, nl_assertions: Literal["skip"] | None = None) -> Tau2Factory:
    """Return the factory of `tau2/telecom`. The arguments are as for `airline`."""
    return _factory("telecom", data or default_data(), nl_assertions)


_factory = cache(Tau2Factory)
"""Factories are shared, because each one keeps its data."""
