"""`toolroll check-env`: it is right about broken environments, and about those that are shipped."""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.commands import toolroll

from toolroll import (
    Action,
    ActionError,
    Environment,
    Observation,
    StepResult,
    Task,
    ToolCall,
    UsageError,
)
from toolroll.evaluation.environment_check import CheckResult, check
from toolroll.evaluation.environment_recorder import EnvironmentRecorder
from toolroll.rollout.runs.environment_class import EnvironmentClass
from toolroll.rollout.runs.registry import find_environment
from toolroll.rollout.types import EnvironmentFactory, EnvironmentOptions

NUMBERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}


class Adder(Environment):
    """An environment without a fault, which the others change."""

    tasks: Any = ({"id": "small", "a": 1, "b": 2}, {"id": "large", "a": 30, "b": 40})

    def reset(self, task: Task, seed: int) -> Observation:
        self.task = task.data
        prompt = f"What is {task.data['a']} + {task.data['b']}?"
        return Observation([{"role": "user", "content": prompt}], tools=[ADD])

    def step(self, action: Action) -> StepResult:
        if not action.tool_calls:
            right = str(self.task["a"] + self.task["b"]) in action.content
            return StepResult(reward=float(right), done=True)
        return StepResult(
            [
                {"role": "tool", "tool_call_id": call.id, "content": self.call(call)}
                for call in action.tool_calls
            ]
        )

    def call(self, call: ToolCall) -> str:
        given = call.arguments or {}
        numbers = [given.get("a"), given.get("b")]
        if call.name != "add" or not all(isinstance(number, int) for number in numbers):
            raise ActionError("add takes a and b")
        return str(given["a"] + given["b"])

    @staticmethod
    def reference(task: Task) -> Sequence[Action] | None:
        a, b = task.data["a"], task.data["b"]
        return [Action("", (ToolCall("add", {"a": a, "b": b}, ""),)), Action(f"It is {a + b}.")]


class Unseeded(Adder):
    def reset(self, task: Task, seed: int) -> Observation:
        found = super().reset(task, seed)
        return Observation([*found.messages, {"role": "user", "content": str(random.random())}])


class LeftOver(Adder):
    """Something of an episode is left for the next one."""

    said: ClassVar[list[str]] = []

    def call(self, call: ToolCall) -> str:
        self.said.append("x")
        return str(len(self.said))


class LongResult(LeftOver):
    """The beginning of a tool result does not differ."""

    def call(self, call: ToolCall) -> str:
        return f"{'x' * 500} step {super().call(call)} {'y' * 500}"


class Shared(Adder):
    """The state is one for all episodes, and is reset with each."""

    state: ClassVar[dict[str, Any]] = {}

    def reset(self, task: Task, seed: int) -> Observation:
        found = super().reset(task, seed)
        self.state.update(task.data)
        return found

    def call(self, call: ToolCall) -> str:
        return str(self.state["a"] + self.state["b"])


class Careless(Adder):
    def call(self, call: ToolCall) -> str:
        assert call.arguments is not None
        return str(call.arguments["a"] + call.arguments["b"])


class WrongReference(Adder):
    @staticmethod
    def reference(task: Task) -> Sequence[Action]:
        return [Action("It is 3.")]


class Blocking(Adder):
    """Waits on the event loop."""

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        if not action.tool_calls:
            time.sleep(0.055)  # noqa: ASYNC251 - the fault
        return super().step(action)


class BlockingPlain(Adder):
    blocking = False

    def step(self, action: Action) -> StepResult:
        if not action.tool_calls:
            time.sleep(0.055)
        return super().step(action)


class WrongSchema(Adder):
    def reset(self, task: Task, seed: int) -> Observation:
        properties = {"a": {"type": "int"}}
        parameters = {"type": "object", "properties": properties}
        tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
        return Observation(super().reset(task, seed).messages, tools=[tool])


class RequiredButUnknown(Adder):
    def reset(self, task: Task, seed: int) -> Observation:
        function = {"name": "add", "parameters": NUMBERS | {"required": ["c"]}}
        tool = {"type": "function", "function": function}
        return Observation(super().reset(task, seed).messages, tools=[tool])


class Silent(Adder):
    """A call is not answered."""

    def step(self, action: Action) -> StepResult:
        return StepResult() if action.tool_calls else super().step(action)


class OneThread(Adder):
    """A connection that may be used in the thread that made it only."""

    def reset(self, task: Task, seed: int) -> Observation:
        self.database = sqlite3.connect(":memory:")
        return super().reset(task, seed)

    def call(self, call: ToolCall) -> str:
        self.database.execute("select 1")
        return super().call(call)


class BadReset(Adder):
    def reset(self, task: Task, seed: int) -> Any:
        return {"messages": []}


class BadMessage(Adder):
    def reset(self, task: Task, seed: int) -> Observation:
        super().reset(task, seed)
        return Observation([{"role": "human", "content": "Hello."}])


class NotANumber(Adder):
    def step(self, action: Action) -> StepResult:
        return StepResult(reward=float("nan"), done=True)


class BadClose(Adder):
    def close(self) -> None:
        raise OSError("the socket is gone")


class CloseBeforeReset(Adder):
    def close(self) -> None:
        del self.task


class Doubled(Adder):
    tasks = ({"id": "same", "a": 1, "b": 2}, {"id": "same", "a": 3, "b": 4})


class Exits(Adder):
    def step(self, action: Action) -> StepResult:
        raise SystemExit(3)


class Endless(Adder):
    """A step that never returns."""

    def step(self, action: Action) -> StepResult:
        threading.Event().wait()
        raise AssertionError


class BadReference(Adder):
    @staticmethod
    def reference(task: Task) -> Sequence[Action]:
        return [Action(task.data["solution"])]


class BadConstructor(Adder):
    def __init__(self) -> None:
        self.rooms = dict[str, Any]()["rooms"]


BROKEN = [
    (Unseeded, "same seed, same episode", r"messages\[1\].content of reset is '"),
    (
        LeftOver,
        "same seed, same episode",
        r"messages\[0\].content of step 1 is '\d+' the first time and '\d+' the second time$",
    ),
    (
        LongResult,
        "same seed, same episode",
        r"messages\[0\].content of step 1 is \.\.\. 'x+ step \d+ y+ \.\.\. the first time and ",
    ),
    (
        Shared,
        "two episodes at once",
        r"task small changes if another episode runs: messages\[0\].content of step 1 is '3' alone "
        "and '70' with another episode$",
    ),
    (Careless, "wrong arguments", r"an unknown tool, no_such_tool\(\{\}\): .*KeyError: 'a'"),
    (WrongReference, "reference actions", r"1 of 2 do not earn 1.0: large: 0.0"),
    (Blocking, "event loop", "a call of Blocking blocks the event loop for 0.0"),
    (BlockingPlain, "event loop", "a call of BlockingPlain blocks the event loop for 0.0"),
    (WrongSchema, "tool schemas", 'add: parameters/properties/a/type: "int" is not valid'),
    (RequiredButUnknown, "tool schemas", "add: 'c' is required and not among the properties"),
    (Silent, "an episode", "Silent.step returned no tool message for the call to add"),
    (BadReset, "an episode", "BadReset.reset must return an Observation, not dict"),
    (BadMessage, "an episode", r"messages\[0\] must be a mapping with a role"),
    (NotANumber, "an episode", "NotANumber.step gave the reward nan"),
    (BadClose, "close", "close failed: .*OSError: the socket is gone"),
    (CloseBeforeReset, "close", "before reset: CloseBeforeReset.close failed: AttributeError"),
    (Doubled, "tasks", "1 task ids are not unique, such as 'same'"),
    (Endless, "an episode", "step took more than 0.1 s"),
    (BadReference, "an episode", "KeyError: 'solution'"),
    (BadConstructor, "an episode", "KeyError: 'rooms'"),
    (Exits, "an episode", r"Exits.step failed: SystemExit: 3 \("),
]


async def checked(
    factory: EnvironmentFactory, tasks: int = 4, time_limit: float = 60.0
) -> list[CheckResult]:
    chosen = factory.tasks(factory.splits[0])[:tasks]
    return await check(factory, chosen, time_limit=time_limit)


def failed(results: list[CheckResult]) -> list[str]:
    return [f"{result.name}: {result.detail}" for result in results if result.status == "failed"]


@pytest.mark.parametrize(("kind", "name", "words"), BROKEN)
async def test_each_fault_is_found_once_and_named(
    kind: type[Environment], name: str, words: str
) -> None:
    tasks = 1 if name == "event loop" else 2  # each of its steps waits
    time_limit = 0.1 if kind is Endless else 60.0
    found = failed(await checked(EnvironmentClass(kind, "broken"), tasks, time_limit))
    assert len(found) == 1, found
    assert re.match(f"{name}: .*{words}", found[0]), found


async def test_an_object_of_one_thread_is_found() -> None:
    found = failed(await checked(EnvironmentClass(OneThread, "broken")))
    assert found and all("ProgrammingError: SQLite objects created in a" in one for one in found)


async def test_no_call_has_the_thread_of_the_one_before_it() -> None:
    """Also if the platform gives a new thread the ident of one that has ended, as Linux does."""
    idents: list[int] = []

    class Noting(Adder):
        def reset(self, task: Task, seed: int) -> Observation:
            idents.append(threading.get_ident())
            return super().reset(task, seed)

    for _ in range(20):
        task = Task("one", 0, data={"a": 1, "b": 2})
        recorder = EnvironmentRecorder(Noting(), task, 0, 60.0)
        for _ in range(3):
            await recorder.start()
        assert idents[-3] != idents[-2] != idents[-1]


async def test_one_without_a_fault_passes_all_checks() -> None:
    results = await checked(EnvironmentClass(Adder, "adder"))
    assert failed(results) == []
    assert {result.name for result in results if result.status == "not applicable"} == {
        "event loop"  # each call runs in a thread
    }


async def test_without_references_tools_are_called_with_examples() -> None:
    class Alone(Adder):
        tasks = ({"id": "one", "a": 1, "b": 2},)

        @staticmethod
        def reference(task: Task) -> None:
            return None

    results = {one.name: one for one in await checked(EnvironmentClass(Alone, "alone"))}
    assert results["reference actions"].status == "not applicable"
    assert results["same seed, same episode"].status == "ok"

    class Noisy(Alone):
        def call(self, call: ToolCall) -> str:
            return str(random.random())

    assert failed(await checked(EnvironmentClass(Noisy, "noisy")))[0].startswith("same seed")


async def test_an_async_environment_that_waits_passes() -> None:
    class Patient(Adder):
        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            await asyncio.sleep(0)
            return super().step(action)

    results = await checked(EnvironmentClass(Patient, "patient"))
    assert failed(results) == []
    assert next(one for one in results if one.name == "event loop").status == "ok"


SHORT = '''
from toolroll import tool_environment

class Cart:
    def __init__(self, seed: int):
        self.items = [str(seed)]

    def put(self, item: str) -> list[str]:
        """Put an item into the cart."""
        self.items.append(item)
        return self.items

TASKS = [
    {"prompt": "Buy a hat.", "want": "hat", "reference": [{"name": "put", "arguments": {"item": "hat"}}]},
    {"prompt": "Buy a tie.", "want": "tie", "reference": [{"name": "put", "arguments": {"item": "tie"}}]},
]
env = tool_environment(
    tools=[Cart.put], state=Cart, tasks=TASKS,
    reward=lambda task, state: float(task["want"] in state.items),
)
'''  # noqa: E501


def test_the_short_form_passes_at_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "cart.py").write_text(SHORT)
    done = toolroll("check-env", f"{tmp_path / 'cart.py'}:env")
    assert done.exit_code == 0, done.output
    assert "2 of 2 earn 1.0" in done.stdout and "failed" not in done.stdout


def test_a_failed_check_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "cart.py").write_text(SHORT.replace('"want": "hat"', '"want": "[hat]"'))
    done = toolroll("check-env", f"{tmp_path / 'cart.py'}:env", "--tasks", "0")
    assert done.exit_code == 1
    assert "1 of 1 do not earn 1.0: 0: 0.0" in done.stdout


def test_a_reference_that_gets_an_error_is_reported_with_the_error(tmp_path: Path) -> None:
    (tmp_path / "cart.py").write_text(SHORT.replace('"name": "put"', '"name": "add"', 1))
    done = toolroll("check-env", f"{tmp_path / 'cart.py'}:env")
    assert "0: 0.0 (Error: there is no tool 'add'; there are: put)" in done.stdout


def test_an_error_in_a_function_is_reported_with_the_line_of_the_function(tmp_path: Path) -> None:
    (tmp_path / "cart.py").write_text(SHORT.replace("in state.items", "in state.item"))
    done = toolroll("check-env", f"{tmp_path / 'cart.py'}:env")
    assert (
        "reward failed: AttributeError: 'Cart' object has no attribute 'item' "
        "(cart.py, line 19)" in done.stdout
    )
    assert "tool_environment.py" not in done.stdout


async def test_the_desk_passes() -> None:
    assert failed(await checked(find_environment("desk"))) == []


@pytest.mark.skipif(
    find_environment("bfcl/multi_turn_base").missing() is not None, reason="bfcl-eval"
)
@pytest.mark.parametrize("category", ["base", "miss_func", "miss_param"])
async def test_bfcl_passes(category: str) -> None:
    assert failed(await checked(find_environment(f"bfcl/multi_turn_{category}"), tasks=2)) == []


async def test_an_environment_that_needs_a_user_gets_one_who_leaves() -> None:
    class Chat(Adder):
        def __init__(self, options: EnvironmentOptions) -> None:
            if options.user is None:
                raise UsageError("who plays the user?")

        @staticmethod
        def reference(task: Task) -> Sequence[Action]:
            return [Action("What are the numbers?")]

    results = {one.name: one for one in await checked(EnvironmentClass(Chat, "chat"))}
    assert failed(list(results.values())) == []
    assert results["reference actions"].detail.startswith("2 of 2 need a user who answers")
