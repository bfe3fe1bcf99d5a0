"""`DeskFactory`: the desk's tasks and settings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from toolroll.agents.environments.desk.database import handwritten
from toolroll.agents.environments.desk.environment import Desk
from toolroll.agents.environments.desk.generate import generate
from toolroll.agents.environments.desk.judge import reference
from toolroll.agents.environments.desk.policy import BRIEF_POLICY, POLICY
from toolroll.agents.environments.factory import Factory
from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Action, EnvironmentOptions, Task

_POLICIES = {"full": POLICY, "brief": BRIEF_POLICY}
_GENERATED = {"train": 10_000, "held-out": 1_000}


@cache
def _tasks(split: str) -> tuple[Task, ...]:
    if split == "test":
        rows = handwritten()["tasks"]
    else:
        rows = generate(_GENERATED[split], held_out=split == "held-out")
    return tuple(Task(row["id"], index, split, row) for index, row in enumerate(rows))


class DeskFactory(Factory):
    """The factory of the environment.

    The tasks of `test` are written by hand. The tasks of `train` and `held-out` are generated from
    a seed, each with its own library. No member, book, loan or hold of `test` occurs in them. No
    title and no card occurs in both `train` and `held-out`.

    The setting `policy` selects the system message. `full` (the default) states the rules. `brief`
    omits them, for a model that was trained on the rules.
    """

    name = "desk"
    description = (
        "The service desk of a lending library: 33 tasks and 11,000 generated ones, seven tools, "
        "no server and no download."
    )
    splits: tuple[str, ...] = ("test", "train", "held-out")

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks in order. Raise `UsageError` for an unknown split."""
        self.check_split(split)
        return _tasks(split)

    def make(self, options: EnvironmentOptions) -> Desk:
        """Return a new desk. Raise `UsageError` for an unknown setting or policy."""
        self.check_settings(options, "policy")
        policy = options.settings.get("policy", "full")
        if policy not in _POLICIES:
            raise UsageError(f"desk: policy must be full or brief, not {policy!r}")
        return Desk(options, _POLICIES[policy])

    def reference(self, task: Task) -> Sequence[Action]:
        """Return the actions that earn 1.0."""
        return reference(task)


DESK = DeskFactory()
