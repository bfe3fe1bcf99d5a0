"""`tool_environment`: functions, data and a reward as an environment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from toolroll import (
    Action,
    ActionError,
    InteractionResult,
    PlayedCall,
    ToolCall,
    UsageError,
    tool_environment,
)
from toolroll.agents.environments.tool_environment import ToolEnvironmentFactory
from toolroll.rollout.errors import EnvironmentFailure
from toolroll.rollout.runs.registry import find_environment
from toolroll.rollout.types import Environment, EnvironmentOptions, StepResult
from toolroll.testing import play_episode

TWENTY_LINES = '''from toolroll import tool_environment

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b

TASKS = [
    {"prompt": "What is 17 + 25?", "answer": "42"},
    {"prompt": "What is 6 * 9?", "answer": "54"},
    {"prompt": "What is 2 * 3 + 4?", "answer": "10"},
]

def reward(task, final, calls):
    return float(task["answer"] in final and len(calls) > 0)

env = tool_environment(tools=[add, multiply], tasks=TASKS, reward=reward)
'''


def step_of(environment: Environment, action: Action) -> StepResult:
    """The result of a step without a judge, which is no coroutine."""
    result = environment.step(action)
    assert isinstance(result, StepResult)
    return result


class Cart:
    """A cart of one episode."""

    def __init__(self, task: dict[str, Any], seed: int) -> None:
        self.items: list[str] = list(task.get("in_cart", ()))
        self.seed = seed
        self.closed = False

    def put(self, item: str, *, count: int = 1) -> list[str]:
        """Put an item into the cart.

        Args:
            item: what to buy
            count: how often
        """
        self.items += [item] * count
        return self.items

    def close(self) -> None:
        self.closed = True


def look(state: Cart, order: Literal["up", "down"] = "up") -> dict[str, Any]:
    """Look into the cart."""
    return {"items": sorted(state.items, reverse=order == "down"), "seed": state.seed}


def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


def refuse() -> None:
    """Refuse."""
    raise ActionError("not today")


def crash() -> None:
    """Crash."""
    raise RuntimeError("no disk")


def answer(final: str) -> float:
    return float("ok" in final)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(factory: ToolEnvironmentFactory, *replies: str) -> InteractionResult:
    factory.name = factory.name or "mine"
    return await play_episode(factory, factory.tasks("test")[0], replies)


def told(result: InteractionResult) -> list[Any]:
    return [m["content"] for m in result.messages if m["role"] == "tool"]


CARTS: dict[str, Any] = {"tools": [Cart.put, look], "state": Cart, "reward": answer}


async def test_a_file_of_twenty_lines_is_an_environment(tmp_path: Path) -> None:
    assert len([line for line in TWENTY_LINES.splitlines() if line.strip()]) <= 20
    (tmp_path / "sums.py").write_text(TWENTY_LINES)
    factory: Any = find_environment(f"{tmp_path / 'sums.py'}:env")
    assert (factory.name, len(factory.tasks("test"))) == ("sums:env", 3)
    result = await play(factory, call("add", a=17, b=25), "It is 42.")
    assert (result.reward, result.status.value, told(result)) == (1.0, "completed", ["42"])
    assert result.trajectories[0].trained_tokens > 0
    assert (await play(factory, "It is 42.")).reward == 0.0


def test_the_schema_is_the_signature_s_and_the_docstring_s() -> None:
    env = tool_environment(tasks=[{"prompt": "x"}], **CARTS)
    tools = env.make(EnvironmentOptions()).reset(env.tasks("test")[0], 0).tools
    assert [tool["function"] for tool in tools] == [
        {
            "name": "put",
            "description": "Put an item into the cart.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "what to buy"},
                    "count": {"type": "integer", "description": "how often", "default": 1},
                },
                "required": ["item"],
                "additionalProperties": False,
            },
        },
        {
            "name": "look",
            "description": "Look into the cart.",
            "parameters": {
                "type": "object",
                "properties": {
                    "order": {"type": "string", "enum": ["up", "down"], "default": "up"}
                },
                "additionalProperties": False,
            },
        },
    ]


def test_a_tool_with_any_arguments_takes_any() -> None:
    def note(**words: str) -> str:
        """Note."""
        return ",".join(words)

    env = tool_environment(tools=[note], tasks=[{"prompt": "x"}], reward=answer)
    one = env.make(EnvironmentOptions())
    schema = one.reset(env.tasks("test")[0], 0).tools[0]["function"]["parameters"]
    assert schema == {"type": "object", "properties": {}, "additionalProperties": True}
    step = step_of(one, Action("", (ToolCall("note", {"a": "b", "c": "d"}, "", id="c"),)))
    assert step.messages[0]["content"] == "a,c"


async def test_tools_share_the_state_of_their_own_episode() -> None:
    task = {"prompt": "Buy a hat.", "in_cart": ["shoe"]}
    env = tool_environment(tasks=[task], **CARTS)
    for _ in range(2):  # nothing of the first episode is left in the second
        result = await play(env, call("put", item="hat", count=2), call("look"), "ok")
        seen = json.loads(told(result)[1])
        assert (told(result)[0], seen["items"]) == (
            '["shoe", "hat", "hat"]',
            ["hat", "hat", "shoe"],
        )
    assert seen["seed"] > 0  # pyright: ignore[reportPossiblyUnboundVariable]


def test_the_state_is_closed_with_the_episode() -> None:
    env = tool_environment(tasks=[{"prompt": "x"}], **CARTS)
    one = env.make(EnvironmentOptions())
    one.reset(env.tasks("test")[0], 0)
    state = one._state
    one.close()
    assert state.closed
    plain = tool_environment(tools=[divide], tasks=[{"prompt": "x"}], reward=answer)
    plain.make(EnvironmentOptions()).close()


class Ticket:
    closed = 0

    def close(self) -> str:
        """Close the ticket."""
        self.closed += 1
        return "Closed."


class AsyncTicket:
    closed = 0

    async def close(self) -> None:
        self.closed += 1


async def _closed(state: Any, *tools: Any) -> int:
    """How often an episode closed its state."""
    made = state()
    env = tool_environment(tools=tools, tasks=[{"prompt": "x"}], reward=answer, state=lambda: made)
    result = await play(env, "ok")
    assert "close_error" not in result.info
    closed: int = made.closed
    return closed


async def test_a_tool_named_close_is_not_called_at_the_end() -> None:
    assert await _closed(Ticket) == 1
    assert await _closed(Ticket, Ticket.close) == 0


async def test_an_async_close_of_the_state_is_awaited() -> None:
    assert await _closed(AsyncTicket) == 1


def test_the_reward_gets_what_its_parameters_name() -> None:
    seen: list[Any] = []

    def reward(calls: list[PlayedCall], state: dict[str, Any], *, weight: float = 0.5) -> float:
        seen.append((calls, state))
        return weight

    env = tool_environment(tools=[divide], tasks=[{"prompt": "x"}], reward=reward, state=dict)
    one = env.make(EnvironmentOptions())
    one.reset(env.tasks("test")[0], 0)
    assert env.reference(env.tasks("test")[0]) is None
    assert step_of(one, Action("bye")).reward == 0.5
    assert seen == [([], {})]


WRONG = [
    (call("divide", a=1, b=0), "Error: ZeroDivisionError: float division by zero"),
    (call("refuse"), "Error: not today"),
    (call("divide", a=1), "b"),
    (call("divide", a="1", b=2), "a"),
    (call("divide", a=1, b=2, c=3), "c"),
    (call("nothing"), "nothing"),
]


@pytest.mark.parametrize(("reply", "words"), WRONG)
async def test_the_model_is_told_what_it_did_wrong(reply: str, words: str) -> None:
    env = tool_environment(tools=[divide, refuse], tasks=[{"prompt": "x"}], reward=answer)
    result = await play(env, reply, "ok")
    assert result.reward == 1.0
    (said,) = told(result)
    assert said.startswith("Error: ") and words in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"a": 1}, "the argument 'b' is missing"),
        ({"a": "1", "b": 2}, "the argument 'a' must be a valid number, not \"1\""),
        ({"a": 1, "b": 2, "c": 3}, "there is no argument 'c'; there are a, b"),
    ],
)
def test_the_environment_checks_arguments_itself(arguments: dict[str, Any], words: str) -> None:
    """Not every agent checks them before."""
    env = tool_environment(tools=[divide], tasks=[{"prompt": "x"}], reward=answer)
    one = env.make(EnvironmentOptions())
    one.reset(env.tasks("test")[0], 0)
    step = step_of(one, Action("", (ToolCall("divide", arguments, "", id="c"),)))
    assert step.messages[0]["content"] == f"Error: {words}"
    assert one.metrics() == {"tool_errors": 1.0, "tool_errors/divide": 1.0}


async def test_a_bug_of_a_tool_aborts_the_episode_and_names_its_line() -> None:
    env = tool_environment(tools=[crash], tasks=[{"prompt": "x"}], reward=answer)
    result = await play(env, call("crash"), "ok")
    assert (result.reward, result.stop_reason.value) == (None, "environment_error")
    said = result.info["error"]["message"]
    assert "the tool crash failed: RuntimeError: no disk (test_tool_environment.py, line" in said
    assert "RuntimeError" in result.info["error"]["traceback"]
    told_too = tool_environment(
        tools=[crash], tasks=[{"prompt": "x"}], reward=answer, told_errors=(RuntimeError,)
    )
    assert told(await play(told_too, call("crash"), "ok")) == ["Error: RuntimeError: no disk"]


def later() -> Any:
    """Return a coroutine."""
    return _later()


def several() -> Any:
    """Yield."""
    yield 1


@pytest.mark.parametrize(("tool", "words"), [(later, "coroutine"), (several, "generator")])
@pytest.mark.filterwarnings("ignore:coroutine '_later' was never awaited")
async def test_a_tool_must_return_a_value(tool: Any, words: str) -> None:
    """The model read "<coroutine object ...>"."""
    env = tool_environment(tools=[tool], tasks=[{"prompt": "x"}], reward=answer)
    result = await play(env, call(tool.__name__), "ok")
    assert result.stop_reason.value == "environment_error"
    assert f"the tool {tool.__name__} returned a {words}" in result.info["error"]["message"]


def pairs() -> Any:
    """Return pairs."""
    return {(1, 2): 3}


async def test_any_result_becomes_json() -> None:
    env = tool_environment(tools=[pairs], tasks=[{"prompt": "x"}], reward=answer)
    assert told(await play(env, call("pairs"), "ok")) == ['{"(1, 2)": 3}']


@pytest.mark.parametrize("part", ["reward", "state"])
async def test_a_bug_of_the_reward_or_the_state_names_its_line(part: str) -> None:
    def broken(task: dict[str, Any]) -> float:
        return float(task["nothing"])

    given: dict[str, Any] = {"tools": [], "tasks": [{"prompt": "x"}], "reward": answer}
    result = await play(tool_environment(**{**given, part: broken}), "ok")
    assert result.stop_reason.value == "environment_error"
    assert re.match(
        rf"{part} failed: KeyError: 'nothing' \(test_tool_environment.py, line \d+\)",
        result.info["error"]["message"],
    )


async def test_reference_replies_are_played() -> None:
    steps = [
        {"name": "put", "arguments": {"item": "hat"}},
        [{"name": "look", "arguments": {}}, {"name": "put", "arguments": {"item": "tie"}}],
        "ok",
    ]
    env = tool_environment(tasks=[{"prompt": "x", "reference": steps}], name="cart", **CARTS)
    result = await play_episode(env, env.tasks("test")[0])
    assert result.reward == 1.0
    assert told(result)[2] == '["hat", "tie"]'
    wrong = tool_environment(tasks=[{"prompt": "x", "reference": [{"name": "put"}]}], **CARTS)
    with pytest.raises(UsageError, match="task 0: each step of 'reference' must be"):
        wrong.reference(wrong.tasks("test")[0])


def test_tasks_come_from_a_file_or_by_split(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    messages = [{"role": "user", "content": "b"}]
    rows = [{"id": "one", "prompt": "a"}, {"messages": messages}]
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    env = tool_environment(tools=[divide], tasks=file, reward=answer, system="Be brief.")
    assert [task.id for task in env.tasks("test")] == ["one", "1"]
    shown = env.make(EnvironmentOptions()).reset(env.tasks("test")[1], 0).messages
    assert list(shown) == [{"role": "system", "content": "Be brief."}, *messages]
    split = tool_environment(tools=[], tasks={"train": rows, "test": rows[:1]}, reward=answer)  # type: ignore[dict-item]
    assert (split.splits, len(split.tasks("test"))) == (("train", "test"), 1)
    with pytest.raises(UsageError, match="has no split 'dev'; it has train, test"):
        split.tasks("dev")
    file.write_text('{"prompt": "a"}\nnot json\n')
    with pytest.raises(UsageError, match=r"tasks.jsonl, line 2 is not JSON"):
        tool_environment(tools=[], tasks=str(file), reward=answer)


def test_a_file_of_tasks_is_beside_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is in the working directory, as a notebook's is."""
    for folder, prompt in (("mine", "beside"), ("here", "in the working directory")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.jsonl").write_text(json.dumps({"prompt": prompt}))
    (tmp_path / "mine" / "sums.py").write_text(
        "from toolroll import tool_environment\n"
        "env = tool_environment(tools=[], tasks='t.jsonl', reward=lambda: 1.0)\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    found = find_environment("../mine/sums.py:env")
    assert [task.data["prompt"] for task in found.tasks("test")] == ["beside"]
    env = tool_environment(tools=[], tasks="t.jsonl", reward=answer)
    assert env.tasks("test")[0].data["prompt"] == "in the working directory"
    place = Path(__file__).parent
    with pytest.raises(UsageError, match=f"no file u.jsonl in {place} or {Path.cwd()}"):
        tool_environment(tools=[], tasks="u.jsonl", reward=answer)


async def _later() -> None: ...


def _odd(cart: Cart) -> None: ...


BASE: dict[str, Any] = {"tools": [divide], "tasks": [{"prompt": "x"}], "reward": answer}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tools": [look]}, "the tool look has the parameter 'state': give state="),
        ({"tools": [divide, divide]}, "two tools are named 'divide'"),
        ({"tools": [lambda: 1]}, "a tool must be a function with a name"),
        ({"tools": [3]}, "a tool must be a function with a name, not 3"),
        ({"tools": [_later]}, "the tool _later is async"),
        ({"tools": [_odd]}, "_odd: a parameter has no JSON schema"),
        ({"tasks": []}, "there are no tasks"),
        ({"tasks": ["x"]}, r"tasks\[0\] must be a dict, not str"),
        ({"tasks": [{"answer": 1}]}, r"tasks\[0\] needs a prompt"),
        ({"tasks": [{"prompt": ["x"]}]}, "prompt must be text"),
        ({"tasks": [{"id": 1, "prompt": "x"}] * 2}, "two tasks have the id '1'"),
        ({"tasks": "none.jsonl"}, "there is no file none.jsonl"),
        ({"reward": lambda item: 1.0}, "reward has the unknown parameter 'item'; it may have task"),
        ({"reward": 1.0}, "reward must be a function"),
        ({"reward": _later}, "reward is async: write it as a plain function"),
        ({"state": _later}, "state is async"),
        ({"told_errors": ValueError}, "told_errors must be a tuple of exception types"),
        ({"told_errors": ("ValueError",)}, "told_errors must be a tuple of exception types"),
        ({"tasks": [{"messages": "x"}]}, r"tasks\[0\]: messages must be a list of dicts"),
        ({"state": lambda index: 1}, "state has the unknown parameter 'index'; it may have task"),
    ],
)
def test_a_wrong_definition_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tool_environment(**{**BASE, **changed})


def test_settings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"takes no settings, but got: a\. To support settings"):
        tool_environment(**BASE).make(EnvironmentOptions(settings={"a": 1}))


def test_a_tool_with_any_arguments_does_not_take_the_state_from_the_model() -> None:
    def note(state: dict[str, int], **entries: int) -> str:
        """Note numbers."""
        state.update(entries)
        return str(state)

    env = tool_environment(
        tools=[note], tasks=[{"prompt": "Hi"}], reward=lambda state: 1.0, state=dict
    )
    played = env.make(EnvironmentOptions())
    played.reset(env.tasks("test")[0], 0)
    calls = [ToolCall("note", {"a": 1, **more}, "") for more in ({"state": 2}, {"b": 3})]
    texts = [message["content"] for message in step_of(played, Action("", tuple(calls))).messages]
    assert texts == ["Error: there is no argument 'state'; there are none", "{'a': 1, 'b': 3}"]


def test_what_functions_change_in_a_task_belongs_to_the_episode() -> None:
    def pop(state: dict[str, Any]) -> int:
        """Take the last number."""
        return int(state["numbers"].pop())

    env = tool_environment(
        tools=[pop],
        tasks=[{"prompt": "Hi", "numbers": [1, 2]}],
        reward=lambda task: float(len(task["numbers"])),
        state=lambda task: task,
    )
    [task] = env.tasks("test")
    for _ in range(2):
        played = env.make(EnvironmentOptions())
        played.reset(task, 0)
        [answer] = step_of(played, Action("", (ToolCall("pop", {}, ""),))).messages
        assert answer["content"] == "2"
        assert step_of(played, Action("Done.")).reward == 1.0
    assert task.data["numbers"] == [1, 2]


def test_a_reward_that_returns_nothing_is_an_error_of_the_environment() -> None:
    env = tool_environment(tools=[], tasks=[{"prompt": "Hi"}], reward=lambda task: None)  # type: ignore[arg-type, return-value]
    played = env.make(EnvironmentOptions())
    played.reset(env.tasks("test")[0], 0)
    with pytest.raises(EnvironmentFailure, match="reward returned None; it must return a number"):
        step_of(played, Action("Done."))


def test_tasks_may_be_rows_of_a_table() -> None:
    """A null in the column that a row does not use; collections of every kind."""
    rows: list[dict[str, Any]] = [
        {"prompt": "x", "messages": None},
        {"messages": ({"role": "user", "content": "y"},)},
    ]
    env = tool_environment(
        tools=[divide],
        tasks=rows,
        reward=lambda: 1.0,
        told_errors={ValueError},  # type: ignore[arg-type]
    )
    texts = []
    for task in env.tasks("test"):
        seen = env.make(EnvironmentOptions()).reset(task, 0)
        assert not hasattr(seen, "__await__")
        texts.append([one["content"] for one in seen.messages])
    assert texts == [["x"], ["y"]]
