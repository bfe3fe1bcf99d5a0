"""The environments `tau-bench/retail` and `tau-bench/airline`.

Invariants: the package is imported and its database read when they are first needed, once per
split. Task ids are `<split>-<index>`, because tau-bench's tasks have none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from toolroll.agents.environments.factory import Factory
from toolroll.agents.environments.tau_actions import RESPOND_ACTION_NAME
from toolroll.agents.environments.tau_bench.database import Database
from toolroll.agents.environments.tau_bench.environment import TauBenchEnvironment
from toolroll.agents.environments.tau_bench.grading import Bench
from toolroll.agents.environments.tau_bench.package import INSTALL, installed, load_domain
from toolroll.parsers.types import ToolCall
from toolroll.rollout.types import Action, EnvironmentOptions, Task

_FAREWELL = "That is everything I can do for you. Goodbye."


class TauBenchFactory(Factory):
    """The factory of one domain of tau-bench (retail or airline).

    `package` is the name under which tau-bench is imported.
    """

    packages = ("tau_bench",)

    def __init__(
        self, domain: str, splits: tuple[str, ...], description: str, *, package: str = "tau_bench"
    ) -> None:
        self.name = f"tau-bench/{domain}"
        self.description = description
        self.splits = splits
        self._domain = domain
        self._package = package
        self._benches: dict[str, Bench] = {}
        self._lock = threading.Lock()

    def missing(self) -> str | None:
        """Return the command that installs tau-bench without its dependencies, which are not needed
        here. Return None if tau-bench is installed.
        """
        return None if installed(self._package, self._domain) else INSTALL

    def bench(self, split: str) -> Bench:
        """Return the data that all episodes of a split share. All splits share one database."""
        self.check_split(split)
        with self._lock:
            if split not in self._benches:
                domain = load_domain(self._package, self._domain, split)
                known = next(iter(self._benches.values()), None)
                database = (
                    known.database
                    if known
                    else Database(domain.data, domain.to_hashable, domain.consistent_hash)
                )
                self._benches[split] = Bench(replace(domain, data={}), database)
        return self._benches[split]

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all tasks of `split`. Their data is tau-bench's: user_id, instruction, actions,
        outputs.
        """
        tasks = self.bench(split).domain.tasks
        return [
            Task(f"{split}-{index}", index, split, task.model_dump())
            for index, task in enumerate(tasks)
        ]

    def make(self, options: EnvironmentOptions) -> TauBenchEnvironment:
        """Return a new environment. Its only setting is `split`, which is used for tasks that do
        not name their split.
        """
        self.check_settings(options, "split")
        split = str(options.settings.get("split") or self.splits[0])
        return TauBenchEnvironment(self.bench, self.needed_user(options), split=split)

    def reference(self, task: Task) -> Sequence[Action]:
        """Return tau-bench's actions, one per step, and a last line with the required outputs and a
        farewell.

        A transfer to a human ends the episode at once. So it comes last, and only if no output is
        required.
        """
        domain = self.bench(task.split or self.splits[0]).domain
        found = self.bench(task.split or self.splits[0]).task(task.index)
        calls = [action for action in found.actions if action.name != RESPOND_ACTION_NAME]
        steps = [_call(action) for action in calls if action.name not in domain.terminate_tools]
        endings = [_call(action) for action in calls if action.name in domain.terminate_tools]
        if endings and not found.outputs:
            return [*steps, endings[0]]
        outputs = f"You asked for: {'; '.join(found.outputs)}. " if found.outputs else ""
        return [*steps, Action(outputs + _FAREWELL)]


def _call(action: object) -> Action:
    data = action.model_dump()  # type: ignore[attr-defined]
    return Action("", (ToolCall(data["name"], data["kwargs"], ""),))


RETAIL = TauBenchFactory(
    "retail",
    ("test", "train", "dev"),
    "tau-bench retail: orders, returns and exchanges; a model plays the user",
)
AIRLINE = TauBenchFactory(
    "airline",
    ("test",),
    "tau-bench airline: bookings and changes of flights; a model plays the user",
)
