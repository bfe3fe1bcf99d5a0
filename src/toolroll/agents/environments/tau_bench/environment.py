"""`TauBenchEnvironment`: one episode of tau-bench, with an asynchronous user simulator, and the
factories of `tau-bench/retail` and `tau-bench/airline`.

The tasks, tools, database, policy and reward are the benchmark's. The loop is toolroll's, because
the package's own loop can give the reward 1.0 for a step after the end, loads its database three
times per episode, and blocks the event loop.

Invariants: nothing happens after `done`. An error of the model is an observation. The user never
gets blank text. A failed user simulator never results in a reward. The package is imported and its
database read when they are first needed, once per split. Task ids are `<split>-<index>`, because
tau-bench's tasks have none.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolroll.agents.environments.factory import Factory
from toolroll.agents.environments.tau_bench.database import Database
from toolroll.agents.environments.tau_bench.grading import Bench
from toolroll.agents.environments.tau_bench.package import INSTALL, installed, load_domain
from toolroll.agents.loop.adapt import NOT_EXECUTED, RESPOND_ACTION_NAME, check_no_respond
from toolroll.agents.loop.call_policy import tool_message
from toolroll.agents.loop.environment_runner import DRAWN
from toolroll.agents.users import OpenAIUser, checked_line, is_stop
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import (
    Action,
    Environment,
    EnvironmentOptions,
    Observation,
    ParallelCalls,
    StepResult,
    Task,
    UserSimulator,
)
from toolroll.rollout.errors import ActionError, EnvironmentFailure
from toolroll.rollout.types import Message

_CALL_PREFIX = "Error: "


class TauBenchEnvironment(Environment):
    """One episode.

    `bench_of(split)` returns the data that episodes share. `make_user(seed)` creates the user at
    `reset`. `split` is used for tasks that do not name their split (tasks chosen by `task_index`).
    """

    parallel_calls: ParallelCalls = "first"
    blocking = False  # a step takes milliseconds at most, and all waiting is awaited

    def __init__(
        self,
        bench_of: Callable[[str], Bench],
        make_user: Callable[[int], UserSimulator],
        *,
        split: str,
    ) -> None:
        self._bench_of = bench_of
        self._make_user = make_user
        self._split = split
        self._user: UserSimulator | None = None
        self._index = 0
        self._data: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._calls = self._errors = 0

    @property
    def data(self) -> Mapping[str, Any] | None:
        """The episode's database. None before `reset` and after the end."""
        return self._data

    async def reset(self, task: Task, seed: int) -> Observation:
        """Return the policy as the system message, the user's first line, and the tools.

        Raise `UsageError` for a task out of range.
        """
        self._bench = self._bench_of(task.split or self._split)
        drawn = {}
        self._index, self._texts, self._calls, self._errors = task.index, [], 0, 0
        if task is DRAWN:  # each time anew, as in the package: the seed is the user's
            self._index = random.randrange(len(self._bench.domain.tasks))
            drawn["task_index"] = self._index
        tau_task = self._bench.task(self._index)
        self._data = self._bench.database.copy()
        self._user = self._make_user(seed)
        if isinstance(self._user, OpenAIUser):
            self._user.adopt_prompt(self._bench.domain.user_prompt)
        line = checked_line(await self._user.reset(tau_task.instruction))
        messages: list[Message] = [
            {"role": "system", "content": self._bench.domain.wiki},
            {"role": "user", "content": line},
        ]
        return Observation(
            messages,
            self._bench.domain.tools_info,
            {"task": tau_task.model_dump(), "source": "user", **drawn},
        )

    async def step(self, action: Action) -> StepResult:
        """Execute the calls in order until one of them ends the episode. If there are no calls,
        send the text to the user.
        """
        if self._data is None:
            raise EnvironmentFailure("step was called before reset or after the episode ended")
        if not action.tool_calls:
            return await self._respond(action.content)
        for call in action.tool_calls:
            _check(call)
        messages: list[Message] = []
        done, source = False, ""
        for call in action.tool_calls:
            if done:
                messages.append(tool_message(call, NOT_EXECUTED))
                continue
            async with self._bench.turn():
                observation = self._bench.invoke(self._data, call.name, call.arguments or {})
            self._calls += 1
            self._errors += observation.startswith((_CALL_PREFIX, "Unknown action "))
            messages.append(tool_message(call, observation))
            done, source = call.name in self._bench.domain.terminate_tools, call.name
        return await self._result(messages, source, done=done)

    async def _respond(self, content: str) -> StepResult:
        if not content.strip():
            raise ActionError("Your reply was empty. Write to the user, or call a tool.")
        assert self._user is not None
        line = checked_line(await self._user.step(content))
        self._texts.append(content)
        return await self._result([{"role": "user", "content": line}], "user", done=is_stop(line))

    async def _result(self, messages: list[Message], source: str, *, done: bool) -> StepResult:
        """Return the result of a step. At the end, grade the episode and drop the database."""
        if not done:
            return StepResult(messages, 0.0, False, info={"source": source})
        assert self._data is not None
        expected = await self._bench.expected(self._index)
        async with self._bench.turn():
            graded = self._bench.grade(self._index, expected, self._data, self._texts)
        self._data = None
        return StepResult(
            messages, float(graded["reward"]), True, info={"source": source, "reward_info": graded}
        )

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers of calls and of failed calls, and the user's metrics."""
        user = self._user.metrics() if self._user is not None else {}
        return {"calls": float(self._calls), "tool_errors": float(self._errors), **user}

    async def close(self) -> None:
        self._data = None
        if self._user is not None:
            await self._user.close()


def _check(call: ToolCall) -> None:
    check_no_respond(call)
    if call.arguments is not None and not isinstance(call.arguments, dict):
        raise ActionError(f"the arguments of {call.name} must be a JSON object")


_FAREWELL = "That is everything I can do for you. Goodbye."


class TauBenchFactory(Factory):
    """The factory of one domain of tau-bench (retail or airline).

    `package` is the name under which tau-bench is imported.
    """

    packages = ("tau_bench",)
    setting = "split"

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
                loaded = next(iter(self._benches.values()), None)
                database = (
                    loaded.database
                    if loaded
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
        self.check_settings(options.settings)
        split = str(options.settings.get("split") or self.splits[0])
        return TauBenchEnvironment(self.bench, self.needed_user(options), split=split)

    def reference(self, task: Task) -> Sequence[Action]:
        """Return tau-bench's actions, one per step, and a last line with the required outputs and a
        farewell.

        A transfer to a human ends the episode at once. So it comes last, and only if no output is
        required.
        """
        domain = self.bench(task.split or self.splits[0]).domain
        tau_task = self.bench(task.split or self.splits[0]).task(task.index)
        calls = [action for action in tau_task.actions if action.name != RESPOND_ACTION_NAME]
        steps = [_call(action) for action in calls if action.name not in domain.terminate_tools]
        endings = [_call(action) for action in calls if action.name in domain.terminate_tools]
        if endings and not tau_task.outputs:
            return [*steps, endings[0]]
        outputs = f"You asked for: {'; '.join(tau_task.outputs)}. " if tau_task.outputs else ""
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
