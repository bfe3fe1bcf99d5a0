"""`toolroll check-env`: it is right about broken environments, and about those that are shipped."""

from __future__ import annotations

import random
import re
import threading
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


class Careless(Adder):
    def call(self, call: ToolCall) -> str:
        assert call.arguments is not None
        return str(call.arguments["a"] + call.arguments["b"])


class WrongReference(Adder):
    @staticmethod
    def reference(task: Task) -> Sequence[Action]:
        return [Action("It is 3.")]


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


class Untyped(Adder):
    def reset(self, task: Task, seed: int) -> Observation:
        properties = NUMBERS["properties"] | {"b": {"description": "the second number"}}
        function = {"name": "add", "parameters": NUMBERS | {"properties": properties}}
        tool = {"type": "function", "function": function}
        return Observation(super().reset(task, seed).messages, tools=[tool])


class NoObject(Adder):
    def reset(self, task: Task, seed: int) -> Observation:
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        return Observation(super().reset(task, seed).messages, tools=[tool])


class Generous(Adder):
    """Each answer is right."""

    def step(self, action: Action) -> StepResult:
        result = super().step(action)
        return StepResult(result.messages, reward=1.0, done=result.done)


class Silent(Adder):
    """A call is not answered."""

    def step(self, action: Action) -> StepResult:
        return StepResult() if action.tool_calls else super().step(action)


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
    (Unseeded, "same seed, same episode", r"task small differs .*: messages\[1\].content is '"),
    (
        LeftOver,
        "same seed, same episode",
        r"messages\[2\].content is '\d+' the first time and '\d+' the second time$",
    ),
    (
        LongResult,
        "same seed, same episode",
        r"messages\[2\].content is \.\.\. 'x+ step \d+ y+ \.\.\. the first time and ",
    ),
    (
        Careless,
        "wrong calls get an answer",
        r"an unknown tool, no_such_tool\(\{\}\): .*KeyError: 'a'",
    ),
    (WrongReference, "references earn 1.0", r"1 of 2 do not earn 1.0: large: 0.0$"),
    (
        Generous,
        "doing nothing does not earn 1.0",
        "a farewell earns 1.0 in 2 of 2: a model would learn to do nothing$",
    ),
    (
        WrongSchema,
        "every argument has a type",
        'add: parameters/properties/a/type: "int" is not valid',
    ),
    (RequiredButUnknown, "every argument has a type", "add: the argument 'c' has no type$"),
    (Untyped, "every argument has a type", "add: the argument 'b' has no type$"),
    (NoObject, "every argument has a type", 'add: the parameters must have "type": "object"$'),
    (Silent, "same seed, same episode", "Silent.step returned no tool message for the call to add"),
    (BadReset, "same seed, same episode", "BadReset.reset must return an Observation, not dict"),
    (BadMessage, "same seed, same episode", r"messages\[0\] must be a mapping with a role"),
    (NotANumber, "same seed, same episode", "NotANumber.step gave the reward nan"),
    (BadClose, "same seed, same episode", "BadClose.close failed: .*OSError: the socket is gone"),
    (Doubled, "tasks load", "1 task ids are not unique, such as 'same'"),
    (Endless, "same seed, same episode", "step took more than 0.1 s"),
    (BadReference, "same seed, same episode", "KeyError: 'solution'"),
    (BadConstructor, "same seed, same episode", "KeyError: 'rooms'"),
    (Exits, "same seed, same episode", r"Exits.step failed: SystemExit: 3 \("),
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
    time_limit = 0.1 if kind is Endless else 60.0
    found = failed(await checked(EnvironmentClass(kind, "broken"), 2, time_limit))
    assert len(found) == 1, found
    assert re.match(f"{name}: .*{words}", found[0]), found


async def test_one_without_a_fault_passes_all_checks() -> None:
    results = await checked(EnvironmentClass(Adder, "adder"))
    assert [(result.name, result.status, result.detail) for result in results] == [
        ("tasks load", "ok", "2 in the split test"),
        ("same seed, same episode", "ok", "two episodes, each played twice"),
        ("references earn 1.0", "ok", "2 of 2"),
        ("doing nothing does not earn 1.0", "ok", "a farewell earns 1.0 in 0 of 2"),
        ("every argument has a type", "ok", "1 tool"),
        ("wrong calls get an answer", "ok", "5 calls"),
    ]


async def test_an_error_ends_the_check() -> None:
    """The next questions would meet it too."""
    results = await checked(EnvironmentClass(Silent, "silent"))
    assert [(result.name, result.status) for result in results] == [
        ("tasks load", "ok"),
        ("same seed, same episode", "failed"),
    ]


class Listed(EnvironmentClass):
    """A factory with the lists of tasks `lists`, one for each call of `tasks`."""

    def __init__(self, *lists: list[Task]) -> None:
        super().__init__(Adder, "listed")
        self.lists = list(lists)

    def tasks(self, split: str) -> list[Task]:
        return self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]


SMALL = {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([[]], "there are no tasks"),
        (
            [[Task("x", 0, "test", SMALL)]] * 2 + [[Task("y", 0, "test", SMALL)]],
            "tasks() returns different tasks when it is called again",
        ),
        ([[Task("x", 1, "test", SMALL)]], "task x has index 1, expected 0"),
        (
            [[Task("x", 0, "test", SMALL | {"c": object()})]],
            "the data of task x is not JSON: Type is not JSON serializable: object",
        ),
    ],
)
async def test_the_tasks_are_checked(lists: list[list[Task]], words: str) -> None:
    assert failed(await checked(Listed(*lists)))[0] == f"tasks load: {words}"


async def test_tasks_that_ask_for_nothing_are_counted() -> None:
    class Half(Adder):
        def step(self, action: Action) -> StepResult:
            result = super().step(action)
            return StepResult(result.messages, float(self.task["a"] == 1), result.done)

        @staticmethod
        def reference(task: Task) -> None:
            return None

    results = {one.name: one for one in await checked(EnvironmentClass(Half, "half"))}
    assert failed(list(results.values())) == []
    assert results["doing nothing does not earn 1.0"].detail == "a farewell earns 1.0 in 1 of 2"


async def test_an_environment_without_tools_passes() -> None:
    class Plain(Adder):
        def reset(self, task: Task, seed: int) -> Observation:
            return Observation(super().reset(task, seed).messages)

        @staticmethod
        def reference(task: Task) -> Sequence[Action]:
            return [Action(f"It is {task.data['a'] + task.data['b']}.")]

    results = await checked(EnvironmentClass(Plain, "plain"))
    assert failed(results) == []
    assert [one.name for one in results if one.detail == "there are no tools"] == [
        "every argument has a type",
        "wrong calls get an answer",
    ]


async def test_without_references_tools_are_called_with_examples() -> None:
    class Alone(Adder):
        tasks = ({"id": "one", "a": 1, "b": 2},)

        @staticmethod
        def reference(task: Task) -> None:
            return None

    results = {one.name: one for one in await checked(EnvironmentClass(Alone, "alone"))}
    assert results["references earn 1.0"].status == "not applicable"
    assert results["same seed, same episode"].status == "ok"

    class Noisy(Alone):
        def call(self, call: ToolCall) -> str:
            return str(random.random())

    assert failed(await checked(EnvironmentClass(Noisy, "noisy")))[0].startswith("same seed")


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
    assert "2 of 2" in done.stdout and "failed" not in done.stdout


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
    assert results["references earn 1.0"].detail.startswith("2 of 2 need a user who answers")
