"""`toolroll check-env`: it is right about broken environments, and about those that are shipped."""

import random
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from jsonschema_rs import Draft202012Validator
from support.commands import toolroll

from toolroll import Action, ActionError, Environment, Observation, StepResult, Task, ToolCall
from toolroll.evaluation.environment_check import CheckResult, check
from toolroll.evaluation.wrong_arguments import example_arguments, wrong_calls
from toolroll.rollout.environment import EnvironmentFactory, EnvironmentOptions
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.environment_class import EnvironmentClass
from toolroll.rollout.runs.registry import find_environment

NUMBERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


class Adder(Environment):
    """An environment without a fault, which the others change."""

    tasks: Any = ({"id": "small", "a": 1, "b": 2}, {"id": "large", "a": 30, "b": 40})
    parameters: Any = NUMBERS

    def reset(self, task: Task, seed: int) -> Observation:
        self.task = task.data
        prompt = f"What is {task.data['a']} + {task.data['b']}?"
        function = {"name": "add", "parameters": self.parameters}
        tools = [{"type": "function", "function": function}]
        return Observation([{"role": "user", "content": prompt}], tools)

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


def adder(**methods: Any) -> type[Adder]:
    """An adder named Broken whose methods are replaced."""
    return type("Broken", (Adder,), methods)


def unseeded(self: Any, task: Task, seed: int) -> Observation:
    prompt = Adder.reset(self, task, seed)
    chance = {"role": "user", "content": str(random.random())}
    return Observation([*prompt.messages, chance], prompt.tools)


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


def generous(self: Any, action: Action) -> StepResult:
    """Each answer is right."""
    result = Adder.step(self, action)
    return StepResult(result.messages, reward=1.0, done=result.done)


def silent(self: Any, action: Action) -> StepResult:
    """A call is not answered."""
    return StepResult() if action.tool_calls else Adder.step(self, action)


def raising(error: BaseException) -> Any:
    def method(self: Any, *args: Any) -> Any:
        raise error

    return method


SAME, TYPED = "same seed, same episode", "every argument has a type"
NO_TYPE = {"properties": NUMBERS["properties"] | {"b": {"description": "the second number"}}}
BROKEN = [
    (adder(reset=unseeded), SAME, r"task small differs .*: messages\[1\].content is '"),
    (LeftOver, SAME, r"messages\[2\].content is '\d+' the first time and '\d+' the second time$"),
    (LongResult, SAME, r"\[2\].content is \.\.\. 'x+ step \d+ y+ \.\.\. the first time and "),
    (adder(call=lambda self, call: str(call.arguments["a"])), "wrong calls get an answer",
     r"an unknown tool, no_such_tool\(\{\}\): .*KeyError: 'a'"),
    (adder(reference=staticmethod(lambda task: [Action("It is 3.")])), "references earn 1.0",
     r"1 of 2 do not earn 1.0: large: 0.0$"),
    (adder(step=generous), "doing nothing does not earn 1.0",
     "a farewell earns 1.0 in 2 of 2: a model would learn to do nothing$"),
    (adder(parameters={"type": "object", "properties": {"a": {"type": "int"}}}), TYPED,
     'add: parameters/properties/a/type: "int" is not valid'),
    (adder(parameters=NUMBERS | {"required": ["c"]}), TYPED, "add: the argument 'c' has no type$"),
    (adder(parameters=NUMBERS | NO_TYPE), TYPED, "add: the argument 'b' has no type$"),
    (adder(parameters={}), TYPED, 'add: the parameters must have "type": "object"$'),
    (adder(step=silent), SAME, "Broken.step returned no tool message for the call to add"),
    (adder(metrics=raising(OSError("no numbers"))), SAME, "Broken.metrics failed: .*no numbers"),
    (adder(close=raising(OSError("the socket is gone"))), SAME,
     "Broken.close failed: .*OSError: the socket is gone"),
    (adder(tasks=({"id": "same", "a": 1, "b": 2}, {"id": "same", "a": 3, "b": 4})), "tasks load",
     "1 task ids are not unique, such as 'same'"),
    (adder(step=lambda *_: threading.Event().wait()), SAME, "step took more than 0.1 s"),
    (adder(reference=staticmethod(lambda task: task.data["solution"])), SAME,
     "KeyError: 'solution'"),
    (adder(__init__=raising(KeyError("rooms"))), SAME, "KeyError: 'rooms'"),
]  # fmt: skip


async def checked(
    factory: EnvironmentFactory, tasks: int = 4, time_limit: float = 60.0
) -> list[CheckResult]:
    chosen = factory.tasks(factory.splits[0])[:tasks]
    return await check(factory, chosen, time_limit=time_limit)


def failed(results: list[CheckResult]) -> list[str]:
    return [f"{result.name}: {result.detail}" for result in results if result.status == "failed"]


@pytest.mark.parametrize(("kind", "name", "words"), BROKEN)
async def test_each_fault_is_found_once(kind: type[Environment], name: str, words: str) -> None:
    time_limit = 0.1 if "more than 0.1 s" in words else 60.0
    [fault] = failed(await checked(EnvironmentClass(kind, "broken"), 2, time_limit))
    assert re.match(f"{name}: .*{words}", fault), fault


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
    results = await checked(EnvironmentClass(adder(step=silent), "silent"))
    names = [(result.name, result.status) for result in results]
    assert names == [("tasks load", "ok"), (SAME, "failed")]


class Listed(EnvironmentClass):
    """A factory with the lists of tasks `lists`, one for each call of `tasks`."""

    def __init__(self, *lists: list[Task]) -> None:
        super().__init__(Adder, "listed")
        self.lists = list(lists)

    def tasks(self, split: str) -> list[Task]:
        return self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]


def small(name: str, index: int = 0, **data: Any) -> list[Task]:
    return [Task(name, index, "test", {"a": 1, "b": 2, **data})]


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([[]], "there are no tasks"),
        ([small("x"), small("x"), small("y")],
         "tasks() returns different tasks when it is called again"),
        ([small("x", 1)], "task x has index 1, expected 0"),
        ([small("x", c=object())],
         "the data of task x is not JSON: Type is not JSON serializable: object"),
    ],
)  # fmt: skip
async def test_the_tasks_are_checked(lists: list[list[Task]], words: str) -> None:
    assert failed(await checked(Listed(*lists)))[0] == f"tasks load: {words}"


NO_REFERENCE = staticmethod(lambda task: None)


async def outcomes(kind: type[Environment]) -> dict[str, CheckResult]:
    """The result of each check, none of which failed."""
    results = await checked(EnvironmentClass(kind, "mine"))
    assert failed(results) == []
    return {result.name: result for result in results}


async def test_tasks_that_ask_for_nothing_are_counted() -> None:
    def half(self: Any, action: Action) -> StepResult:
        result = Adder.step(self, action)
        return StepResult(result.messages, float(self.task["a"] == 1), result.done)

    results = await outcomes(adder(step=half, reference=NO_REFERENCE))
    assert results["doing nothing does not earn 1.0"].detail == "a farewell earns 1.0 in 1 of 2"


async def test_an_environment_without_tools_passes() -> None:
    class Plain(Adder):
        def reset(self, task: Task, seed: int) -> Observation:
            return Observation(super().reset(task, seed).messages)

        @staticmethod
        def reference(task: Task) -> Sequence[Action]:
            return [Action(f"It is {task.data['a'] + task.data['b']}.")]

    results = await outcomes(Plain)
    without = [name for name, result in results.items() if result.detail == "there are no tools"]
    assert without == [TYPED, "wrong calls get an answer"]


async def test_without_references_tools_are_called_with_examples() -> None:
    alone = {"tasks": ({"id": "one", "a": 1, "b": 2},), "reference": NO_REFERENCE}
    results = await outcomes(adder(**alone))
    assert results["references earn 1.0"].status == "not applicable"
    assert "no solution was graded" in results["references earn 1.0"].detail
    assert results[SAME].status == "ok"
    noisy = adder(**alone, call=lambda self, call: str(random.random()))
    assert failed(await checked(EnvironmentClass(noisy, "noisy")))[0].startswith(SAME)


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


@pytest.mark.parametrize(
    ("old", "new", "status", "words"),
    [
        ("", "", 0, "2 of 2"),
        ('"want": "hat"', '"want": "[hat]"', 1, "1 of 1 do not earn 1.0: 0: 0.0"),
        ('"name": "put", "arguments": {"item": "hat"}', '"name": "add", "arguments": {}', 1,
         "0: 0.0 (Error: there is no tool 'add'; there are: put)"),
        ("in state.items", "in state.item", 1,
         "reward failed: AttributeError: 'Cart' object has no attribute 'item' (cart.py, line 19)"),
    ],
)  # fmt: skip
def test_the_command_on_a_file(tmp_path: Path, old: str, new: str, status: int, words: str) -> None:
    assert old in SHORT
    (tmp_path / "cart.py").write_text(SHORT.replace(old, new, 1))
    tasks = ["--tasks", 0] if status else []
    done = toolroll("check-env", f"{tmp_path / 'cart.py'}:env", *tasks)
    assert done.exit_code == status, done.output
    assert words in done.stdout and ("failed" in done.stdout) is bool(status)
    assert "tool_environment.py" not in done.stdout


BFCL = pytest.mark.skipif(
    find_environment("bfcl/multi_turn_base").missing() is not None, reason="bfcl-eval"
)
CATEGORIES = ("base", "miss_func", "miss_param")


@pytest.mark.parametrize(
    "name", ["desk", *(pytest.param(f"bfcl/multi_turn_{kind}", marks=BFCL) for kind in CATEGORIES)]
)
async def test_what_is_shipped_passes(name: str) -> None:
    tasks = 4 if name == "desk" else 2
    assert failed(await checked(find_environment(name), tasks)) == []


async def test_an_environment_that_needs_a_user_gets_one_who_leaves() -> None:
    class Chat(Adder):
        def __init__(self, options: EnvironmentOptions) -> None:
            if options.user is None:
                raise UsageError("who plays the user?")

        @staticmethod
        def reference(task: Task) -> Sequence[Action]:
            return [Action("What are the numbers?")]

    results = await outcomes(Chat)
    assert results["references earn 1.0"].detail.startswith("2 of 2 need a user who answers")


POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
    "required": ["x"],
}
KINDS: dict[str, Any] = {
    "a": {"enum": ["up", "down"]},
    "b": {"type": "integer", "minimum": 7},
    "c": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "d": {"$ref": "#/$defs/Point"},
    "e": {"type": "array", "items": {"type": "string"}},
    "f": {"const": 3},
    "g": {"type": ["number", "null"]},
    "h": {"type": "string", "default": "other"},
}
SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"a": {"type": "string"}}},
    {"type": "object", "properties": KINDS, "required": [*KINDS], "$defs": {"Point": POINT}},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_example_fits_its_schema(schema: dict[str, Any]) -> None:
    example = example_arguments(schema)
    assert sorted(example) == schema.get("required", [])
    Draft202012Validator(schema).validate(example)


def test_wrong_calls_are_wrong_in_one_way_each() -> None:
    tool = {"type": "function", "function": {"name": "go", "parameters": SCHEMAS[2]}}
    calls = wrong_calls([tool])
    validator = Draft202012Validator({**SCHEMAS[2], "additionalProperties": False})
    assert (calls[0][0], calls[0][1].name) == ("an unknown tool", "no_such_tool")
    assert [what for what, _ in calls[1:]] == [
        "missing arguments",
        *(f"{name!r} of another type" for name in "abcdefgh"),
        "an unknown argument",
    ]
    assert [what for what, call in calls[1:] if validator.is_valid(call.arguments)] == []
