"""`tool_environment`: functions, data and a reward as an environment."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from support.episodes import call

from toolroll import Action, ActionError, InteractionResult, PlayedCall, ToolCall, tool_environment
from toolroll.agents.environments.tool_environment import ToolEnvironmentFactory
from toolroll.rollout.environment import Environment, EnvironmentOptions, Observation, StepResult
from toolroll.rollout.errors import EnvironmentFailure, UsageError
from toolroll.rollout.runs.registry import find_environment
from toolroll.rollout.runtime.jsonable import shown
from toolroll.rollout.types import Message
from toolroll.testing import play_episode


class Cart:
    """A cart of one episode."""

    def __init__(self, task: dict[str, Any], seed: int) -> None:
        self.items: list[str] = list(task.get("in_cart", ()))
        self.seed = seed

    def put(self, item: str, *, count: int = 1) -> list[str]:
        """Put an item into the cart.

        Args:
            item: what to buy
            count: how often
        """
        self.items += [item] * count
        return self.items


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


def later() -> Any:
    """Return a coroutine."""
    return _later()


async def _later() -> None: ...


def several() -> Any:
    """Yield."""
    yield 1


def answer(final: str) -> float:
    return float("ok" in final)


def define(*tools: Any, **given: Any) -> ToolEnvironmentFactory:
    """An environment with one task, whose reward is 1.0 for a final "ok"."""
    defaults: dict[str, Any] = {"tools": tools, "tasks": [{"prompt": "x"}], "reward": answer}
    return tool_environment(**{**defaults, **given})


def define_carts(**given: Any) -> ToolEnvironmentFactory:
    return define(Cart.put, look, state=Cart, **given)


def begin(factory: ToolEnvironmentFactory, task: int = 0) -> tuple[Any, Observation]:
    """An episode that was reset, and its first observation."""
    episode = factory.make(EnvironmentOptions())
    return episode, episode.reset(factory.tasks("test")[task], 0)


def step(episode: Environment, *calls: ToolCall, text: str = "") -> StepResult:
    """The result of a step without a judge, which is no coroutine."""
    result = episode.step(Action(text, calls))
    assert isinstance(result, StepResult)
    return result


def contents(messages: Any) -> list[Any]:
    return [message["content"] for message in messages]


async def play(factory: ToolEnvironmentFactory, *replies: str) -> InteractionResult:
    factory.name = factory.name or "mine"
    return await play_episode(factory, factory.tasks("test")[0], replies)


def observed(result: InteractionResult) -> list[Any]:
    return contents(message for message in result.messages if message["role"] == "tool")


def test_the_schema_is_the_signature_s_and_the_docstring_s() -> None:
    _, first = begin(define_carts())
    item = {"type": "string", "description": "what to buy"}
    count = {"type": "integer", "description": "how often", "default": 1}
    order = {"type": "string", "enum": ["up", "down"], "default": "up"}
    common: dict[str, Any] = {"type": "object", "additionalProperties": False}
    put = {**common, "properties": {"item": item, "count": count}, "required": ["item"]}
    look_into = {**common, "properties": {"order": order}}
    assert [tool["function"] for tool in first.tools] == [
        {"name": "put", "description": "Put an item into the cart.", "parameters": put},
        {"name": "look", "description": "Look into the cart.", "parameters": look_into},
    ]


def test_keyword_arguments_are_taken_but_no_state() -> None:
    def keep(state: dict[str, int], **entries: int) -> str:
        """Note numbers."""
        state.update(entries)
        return str(state)

    episode, first = begin(define(keep, reward=lambda state: 1.0, state=dict))
    parameters = first.tools[0]["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {}, "additionalProperties": True}
    calls = [ToolCall("keep", {"a": 1, **more}, "") for more in ({"state": 2}, {"b": 3})]
    assert contents(step(episode, *calls).messages) == [
        "Error: there is no argument 'state'; there are none",
        "{'a': 1, 'b': 3}",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("divide", {"a": 1}, "the argument 'b' is missing"),
        ("divide", {"a": "1", "b": 2}, "the argument 'a' must be a valid number, not \"1\""),
        ("divide", {"a": 1, "b": 2, "c": 3}, "there is no argument 'c'; there are a, b"),
        ("divide", {"a": 1, "b": 0}, "ZeroDivisionError: float division by zero"),
        ("refuse", {}, "not today"),
        ("nothing", {}, "there is no tool 'nothing'; there are: divide, refuse"),
    ],
)
def test_the_model_hears_its_mistake(name: str, arguments: dict[str, Any], words: str) -> None:
    """Not every agent checks arguments before."""
    episode, _ = begin(define(divide, refuse))
    result = step(episode, ToolCall(name, arguments, "", id="c"))
    assert contents(result.messages) == [f"Error: {words}"]
    assert episode.metrics()["tool_errors"] == 1.0
    assert episode.metrics().get("tool_errors/divide") == (1.0 if name == "divide" else None)


async def test_state_and_task_belong_to_their_own_episode() -> None:
    env = define_carts(tasks=[{"prompt": "Buy a hat.", "in_cart": ["shoe"]}])
    for _ in range(2):  # nothing of the first episode is left in the second
        result = await play(env, call("put", item="hat", count=2), call("look"), "ok")
        put, looked = observed(result)
        seen = json.loads(looked)
        assert put == '["shoe", "hat", "hat"]'
        assert seen["items"] == ["hat", "hat", "shoe"] and seen["seed"] > 0

    def pop(state: dict[str, Any]) -> int:
        """Take the last number."""
        return int(state["numbers"].pop())

    env = define(
        pop,
        tasks=[{"prompt": "Hi", "numbers": [1, 2]}],
        reward=lambda task: float(len(task["numbers"])),
        state=lambda task: task,
    )
    for _ in range(2):
        episode, _ = begin(env)
        assert contents(step(episode, ToolCall("pop", {}, "")).messages) == ["2"]
        assert step(episode, text="Done.").reward == 1.0
    assert env.tasks("test")[0].data["numbers"] == [1, 2]


class Ticket:
    closed = 0

    def close(self) -> str:
        """Close the ticket."""
        self.closed += 1
        return "Closed."


class AsyncTicket(Ticket):
    async def close(self) -> None:  # type: ignore[override]
        self.closed += 1


@pytest.mark.parametrize(
    ("kind", "tools", "closed"),
    [(Ticket, [], 1), (AsyncTicket, [], 1), (Ticket, [Ticket.close], 0)],
    ids=["plain", "async", "close is a tool"],
)
async def test_the_end_closes_the_state_once(kind: Any, tools: list[Any], closed: int) -> None:
    state = kind()
    result = await play(define(*tools, state=lambda: state), "ok")
    assert "close_error" not in result.info and state.closed == closed
    define(divide).make(EnvironmentOptions()).close()  # without a state


def test_a_reward_gets_what_it_names_and_returns_a_number() -> None:
    given: list[Any] = []

    def reward(calls: list[PlayedCall], state: dict[str, Any], *, weight: float = 0.5) -> float:
        given.append((calls, state))
        return weight

    env = define(divide, reward=reward, state=dict)
    episode, _ = begin(env)
    assert env.reference(env.tasks("test")[0]) is None
    assert step(episode, text="bye").reward == 0.5
    assert given == [([], {})]
    wrong: Any
    for wrong in None, "yes", ("yes", "why"), (0.0, "why", 1):
        episode, _ = begin(define(reward=lambda wrong=wrong: wrong))
        given = wrong[0] if wrong and len(wrong) == 2 else wrong
        words = f"reward in {Path(__file__).name} returned {shown(given)}: it must return a number"
        with pytest.raises(EnvironmentFailure, match=re.escape(words)):
            step(episode, text="Done.")
    episode, _ = begin(define(reward=lambda final: (0.0, "too late")))
    graded = StepResult(reward=0.0, done=True, info={"reward_reason": "too late"})
    assert step(episode, text="ok") == graded


async def test_results_and_told_errors_are_observations() -> None:
    def pairs() -> Any:
        """Return pairs."""
        return {(1, 2): 3}

    assert observed(await play(define(pairs), call("pairs"), "ok")) == ['{"(1, 2)": 3}']
    env = define(crash, told_errors=(RuntimeError,))
    assert observed(await play(env, call("crash"), "ok")) == ["Error: RuntimeError: no disk"]
    result = await play(define(divide), call("divide", a=1, b=0), "ok")
    assert (result.reward, observed(result)[0][:6]) == (1.0, "Error:")


def broken(task: dict[str, Any]) -> float:
    return float(task["nothing"])


BUG_LINE = r"\(test_tool_environment.py, line \d+\)"


@pytest.mark.parametrize(
    ("given", "reply", "message"),
    [
        ({"tools": [crash]}, call("crash"),
         "the tool crash failed: RuntimeError: no disk " + BUG_LINE),
        ({"tools": [later]}, call("later"), "the tool later returned a coroutine"),
        ({"tools": [several]}, call("several"), "the tool several returned a generator"),
        ({"reward": broken}, "ok", "reward failed: KeyError: 'nothing' " + BUG_LINE),
        ({"state": broken}, "ok", "state failed: KeyError: 'nothing' " + BUG_LINE),
    ],
    ids=["tool", "coroutine", "generator", "reward", "state"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:coroutine '_later' was never awaited")
async def test_a_bug_aborts_and_is_named(given: dict[str, Any], reply: str, message: str) -> None:
    result = await play(define(**given), reply, "ok")
    assert (result.reward, result.stop_reason.value) == (None, "environment_error")
    assert re.match(message, result.info["error"]["message"])
    if "failed" in message:
        assert message.split(": ")[1] in result.info["error"]["traceback"]


async def test_reference_replies_are_played() -> None:
    steps = [
        {"name": "put", "arguments": {"item": "hat"}},
        [{"name": "look", "arguments": {}}, {"name": "put", "arguments": {"item": "tie"}}],
        "ok",
    ]
    env = define_carts(tasks=[{"prompt": "x", "reference": steps}], name="cart")
    result = await play_episode(env, env.tasks("test")[0])
    assert (result.reward, observed(result)[2]) == (1.0, '["hat", "tie"]')
    wrong = define_carts(tasks=[{"prompt": "x", "reference": [{"name": "put"}]}])
    with pytest.raises(UsageError, match="task 0: each step of 'reference' must be"):
        wrong.reference(wrong.tasks("test")[0])


USER: Message = {"role": "user", "content": "b"}


def test_tasks_come_from_a_file_by_split_or_from_a_table(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows: list[Any] = [{"id": "one", "prompt": "a"}, {"messages": [USER]}]
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    env = define(divide, tasks=file, system="Be brief.")
    assert [task.id for task in env.tasks("test")] == ["one", "1"]
    _, first = begin(env, 1)
    assert list(first.messages) == [{"role": "system", "content": "Be brief."}, USER]
    split = define(tasks={"train": rows, "test": rows[:1]})
    assert (split.splits, len(split.tasks("test"))) == (("train", "test"), 1)
    with pytest.raises(UsageError, match="has no split 'dev'; it has train, test"):
        split.tasks("dev")
    file.write_text('{"prompt": "a"}\nnot json\n')
    with pytest.raises(UsageError, match=r"tasks.jsonl, line 2 is not JSON"):
        define(tasks=str(file))
    # A null in the column that a row does not use; collections of every kind
    rows = [{"prompt": "x", "messages": None}, {"messages": (USER,)}]
    env = define(divide, tasks=rows, told_errors={ValueError})
    assert [contents(begin(env, task)[1].messages) for task in (0, 1)] == [["x"], ["b"]]


def test_a_file_of_tasks_is_beside_its_user(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is in the working directory, as a notebook's is."""
    for folder, prompt in (("mine", "beside"), ("here", "in the working directory")):
        (here / folder).mkdir()
        (here / folder / "t.jsonl").write_text(json.dumps({"prompt": prompt}))
    (here / "mine" / "sums.py").write_text(
        "from toolroll import tool_environment\n"
        "env = tool_environment(tools=[], tasks='t.jsonl', reward=lambda: 1.0)\n"
    )
    monkeypatch.chdir(here / "here")
    beside = find_environment("../mine/sums.py:env")
    assert [task.data["prompt"] for task in beside.tasks("test")] == ["beside"]
    env = define(tasks="t.jsonl")
    assert env.tasks("test")[0].data["prompt"] == "in the working directory"
    place = Path(__file__).parent
    with pytest.raises(UsageError, match=f"no file u.jsonl in {place} or {Path.cwd()}"):
        define(tasks="u.jsonl")


def _odd(cart: Cart) -> None: ...


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
        ({"reward": lambda item: 1.0}, "reward has the unknown parameter 'item'; it may have task"),
        ({"reward": 1.0}, "reward must be a function"),
        ({"reward": None}, "there is no reward: give reward= a function, or judge="),
        ({"reward": _later}, "reward is async: write it as a plain function"),
        ({"told_errors": ValueError}, "told_errors must be a tuple of exception types"),
        ({"told_errors": ("ValueError",)}, "told_errors must be a tuple of exception types"),
        ({"tasks": [{"messages": "x"}]}, r"tasks\[0\]: messages must be a list of dicts"),
    ],
)
def test_a_wrong_definition_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        define(**{"tools": [divide], **changed})
