"""The cost of a tau-bench episode without the model and the user: our environment compared with the
package's own, in CPU time.

    python benchmarks/tau_bench_env.py [--tasks N] [--all-rewards]

Prints for each domain the milliseconds of CPU (medians over tasks, all threads of the process) for
making and resetting an environment, for a tool call, and for the step that ends the episode: the
first time for a task (its expected outcome is computed) and again. Then prints the longest gap of
the event loop while 64 episodes are played at once, each task for the first time. `--all-rewards`
plays the reference actions, and no actions at all, on every task of every split in both, and
compares the reward infos (takes some minutes, most of it in the package's own environment). Exits
with 1 if a budget is exceeded or a reward info differs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from toolroll.agents.environments.tau_bench import AIRLINE, INSTALL, RETAIL, TauBenchFactory
from toolroll.agents.environments.tau_bench.package import import_module
from toolroll.agents.users import ScriptedUser
from toolroll.rollout.types import Action, EnvironmentOptions, StepResult, Task

STOP = "###STOP###"
BUDGET = {"make + reset": 20.0, "final step, first": 30.0, "final step, again": 30.0}
"""Milliseconds of CPU."""

GAP = 150.0
"""Milliseconds of wall time."""

USER = EnvironmentOptions(user=lambda seed: ScriptedUser(("Hi",), default=STOP))
BYE = Action("Goodbye.")


class SilentUser:
    """A user for the package's own environment that sends the lines of the scripted user."""

    def reset(self, instruction: str | None = None) -> str:
        return "Hi"

    def step(self, content: str) -> str:
        return STOP

    def get_total_cost(self) -> float:
        return 0.0


def stock_env(factory: TauBenchFactory, split: str, index: int) -> Any:
    """Return the package's own environment for one task."""
    domain = factory.name.partition("/")[2]
    envs = import_module("tau_bench.envs")
    env = envs.get_env(
        domain, user_strategy="human", user_model="", task_split=split, task_index=index
    )
    env.user = SilentUser()
    return env


def stock_action(action: Action) -> Any:
    """Return `action` in the package's own type."""
    make = import_module("tau_bench.types").Action
    if action.tool_calls:
        return make(
            name=action.tool_calls[0].name, kwargs=dict(action.tool_calls[0].arguments or {})
        )
    return make(name="respond", kwargs={"content": action.content})


class Clock:
    """CPU milliseconds by kind of step."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        self._began = 0.0

    def start(self) -> None:
        self._began = time.process_time()

    def stop(self, name: str) -> None:
        self.found.setdefault(name, []).append((time.process_time() - self._began) * 1e3)

    def median(self, name: str) -> float:
        return statistics.median(self.found[name])


async def play(
    factory: TauBenchFactory, task: Task, actions: Sequence[Action], clock: Clock, ending: str
) -> StepResult:
    """Play and time one of our episodes."""
    clock.start()
    env = factory.make(USER)
    await env.reset(task, 0)
    clock.stop("make + reset")
    result = StepResult()
    for action in actions:
        clock.start()
        result = await env.step(action)
        clock.stop(ending if result.done else "tool call")
        if result.done:
            break
    await env.close()
    return result


def play_stock(
    factory: TauBenchFactory, task: Task, actions: Sequence[Action], clock: Clock
) -> Any:
    """Play and time one of the package's own episodes, and return its reward info."""
    clock.start()
    env = stock_env(factory, task.split, task.index)
    env.reset(task.index)
    clock.stop("make + reset")
    response: Any = None
    for action in actions:
        made = stock_action(action)
        clock.start()
        response = env.step(made)
        clock.stop("final step" if response.done else "tool call")
        if response.done:
            break
    return response.info.reward_info.model_dump()


async def measure(factory: TauBenchFactory, count: int) -> bool:
    """Print the table of one domain, and return True if it is within its budgets."""
    began = time.process_time()
    tasks = factory.tasks("test")[:count]
    await play(factory, factory.tasks("test")[-1], [BYE], Clock(), "")
    print(
        f"\n{factory.name}: {len(tasks)} tasks; once a process {time.process_time() - began:.1f} s "
        f"(import, database, its texts)"
    )
    ours, theirs = Clock(), Clock()
    for task in tasks:
        actions = factory.reference(task)
        for ending in ("final step, first", "final step, again"):
            result = await play(factory, task, actions, ours, ending)
        if result.info["reward_info"] != play_stock(factory, task, actions, theirs):
            print(f"{factory.name} {task.id}: another reward info than the package's own")
            return False
    print(
        f"{'':20} {'toolroll':>9} {'tau-bench':>10} {'ratio':>7} {'budget':>7}   ms of CPU, medians"
    )
    kept = True
    for name in ("make + reset", "tool call", "final step, first", "final step, again"):
        mine, stock = ours.median(name), theirs.median(name.partition(",")[0])
        budget = BUDGET.get(name)
        kept = kept and (budget is None or mine <= budget)
        print(f"{name:20} {mine:9.2f} {stock:10.2f} {stock / mine:6.1f}x {budget or '':>7}")
    return kept


async def largest_gap(factory: TauBenchFactory, count: int) -> bool:
    """Print the longest gap of the event loop while `count` episodes ran at once. Return True if it
    is within the budget.
    """
    fresh = TauBenchFactory(factory.name.partition("/")[2], factory.splits, "")
    tasks = (list(fresh.tasks("test")) * count)[:count]
    gap = 0.0

    async def watch() -> None:
        nonlocal gap
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gap, last = max(gap, now - last), now

    async def one(task: Task) -> None:
        env = fresh.make(USER)
        await env.reset(task, 0)
        for action in fresh.reference(task):
            await asyncio.sleep(0)  # in place of an engine's answer
            await env.step(action)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(one(task) for task in tasks))
    watching.cancel()
    print(
        f"{'loop gap, 64 at once':20} {gap * 1e3:9.0f} {'':10} {'':7} {GAP:7.0f}   ms of wall time"
    )
    return gap * 1e3 <= GAP


async def compare_all(factory: TauBenchFactory) -> bool:
    """Compare the reward infos of the reference actions and of doing nothing, on every task."""
    same = total = 0
    for split in factory.splits:
        for task in factory.tasks(split):
            for actions in (factory.reference(task), [BYE]):
                result = await play(factory, task, actions, Clock(), "")
                same += result.info["reward_info"] == play_stock(factory, task, actions, Clock())
                total += 1
    print(f"{factory.name}: {same} of {total} reward infos are those of the package")
    return same == total


async def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=25, help="of each domain's test split")
    parser.add_argument(
        "--all-rewards", action="store_true", help="compare the rewards of all tasks of all splits"
    )
    given = parser.parse_args()
    if RETAIL.missing() is not None:
        print(f"tau-bench is not installed: {INSTALL}")
        return 2
    kept = []
    for factory in (RETAIL, AIRLINE):
        kept += [await measure(factory, given.tasks), await largest_gap(factory, 64)]
    if given.all_rewards:
        kept += [await compare_all(factory) for factory in (RETAIL, AIRLINE)]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
