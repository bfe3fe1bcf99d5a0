"""Two versions of tau-bench: a small package with its interface, and the real one."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from toolroll.agents.environments.tau_bench import INSTALL, TauBenchFactory
from toolroll.agents.environments.tau_bench.package import import_module, installed
from toolroll.agents.users import ScriptedUser
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import Action, EnvironmentOptions, StepResult, Task

STOP = "###STOP###"


@dataclass(frozen=True)
class TauBench:
    """A package with tau-bench's interface. `counts`: tasks, and those that need no action."""

    package: str
    counts: Mapping[tuple[str, str], tuple[int, int]]
    read: tuple[str, dict[str, Any]]
    """A tool of retail that only reads, with its arguments."""

    def factory(self, domain: str = "retail") -> TauBenchFactory:
        """A factory of its own, as the entry points name them."""
        splits = tuple(split for name, split in self.counts if name == domain)
        return TauBenchFactory(domain, splits, f"{domain} for tests", package=self.package)

    def stock_env(self, domain: str, split: str, index: int) -> Any:
        """The package's own environment, with a user who says goodbye."""
        envs = import_module(f"{self.package}.envs")
        env = envs.get_env(
            domain, user_strategy="human", user_model="", task_split=split, task_index=index
        )
        env.user = SyncUser()
        return env

    def stock_action(self, name: str, kwargs: dict[str, Any]) -> Any:
        return import_module(f"{self.package}.types").Action(name=name, kwargs=kwargs)


class SyncUser:
    """A user of tau-bench's kind who wants nothing any more."""

    def reset(self, instruction: str | None = None) -> str:
        return "Hi"

    def step(self, content: str) -> str:
        return STOP

    def get_total_cost(self) -> float:
        return 0.0


MINI = TauBench(
    "support.tau_mini",
    {
        ("retail", "test"): (12, 4),
        ("retail", "train"): (18, 6),
        ("retail", "dev"): (6, 2),
        ("airline", "test"): (6, 2),
    },
    ("find_member", {"name": "Member 3"}),
)
REAL = TauBench(
    "tau_bench",
    {
        ("retail", "test"): (115, 7),
        ("retail", "train"): (500, 5),
        ("retail", "dev"): (20, 1),
        ("airline", "test"): (50, 19),
    },
    ("find_user_id_by_email", {"email": "omar.anderson3456@example.com"}),
)
BOTH = [pytest.param(MINI, id="mini"), pytest.param(REAL, id="real", marks=pytest.mark.peers)]


def needed(bench: TauBench) -> TauBench:
    """`bench`, or a skip that says how to install it."""
    if not installed(bench.package, "retail"):
        pytest.skip(f"tau-bench is on GitHub only: {INSTALL}")
    return bench


def scripted(*lines: str, default: str | None = STOP) -> EnvironmentOptions:
    """A user who says `lines`, then `default`."""
    return EnvironmentOptions(user=lambda seed: ScriptedUser(lines or ("Hi",), default=default))


def call(name: str, /, **arguments: Any) -> Action:
    return Action("", (ToolCall(name, arguments, "", id="c"),))


async def play(env: Any, task: Task, actions: Any) -> StepResult:
    """Reset, and step through `actions` until the end; the last step."""
    await env.reset(task, 0)
    result = StepResult()
    for action in actions:
        result = await env.step(action)
        if result.done:
            break
    await env.close()
    return result


def recorded_trials() -> list[dict[str, Any]]:
    """40 conversations of gpt-4o with tau-bench's airline, in tau-bench's format; or a skip."""
    folder = os.environ.get("TOOLROLL_TEST_DATA")
    path = Path(folder or "", "tau_bench", "gpt-4o-airline-40.json")
    if folder is None or not path.is_file():
        pytest.skip(
            "TOOLROLL_TEST_DATA does not name a folder with tau_bench/gpt-4o-airline-40.json"
        )
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return entries
