"""The domain behind both environments: a shop's orders and members, its tools, and tasks."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from support.tau_mini.envs.base import Env
from support.tau_mini.types import Action, Task


def load() -> dict[str, Any]:
    members = {
        f"m{i}": {"name": f"Member {i}", "city": "Ghent", "points": i, "orders": [f"o{i}"]}
        for i in range(40)
    }
    orders = {
        f"o{i}": {"member": f"m{i}", "status": "open", "lines": [{"item": "cup", "price": 1.5 * i}]}
        for i in range(40)
    }
    loaded: dict[str, Any] = json.loads(
        json.dumps({"orders": orders, "members": members, "holidays": ["1 May", "25 December"]})
    )
    return loaded


def _tool(name: str, /, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": name.replace("_", " "), "parameters": schema},
    }


class Tool:
    """A function as tau-bench's classes of tools have it."""

    def __init__(self, invoke: Callable[..., str], tool: str, /, **parameters: str) -> None:
        self.invoke = invoke
        self._info = _tool(tool, **parameters)

    def get_info(self) -> dict[str, Any]:
        return self._info


def _find_member(data: dict[str, Any], name: str) -> str:
    found = [key for key, member in data["members"].items() if member["name"] == name]
    return found[0] if found else "Error: no such member"


def _show_order(data: dict[str, Any], order: str) -> str:
    orders = data["orders"]
    return json.dumps(orders[order]) if order in orders else "Error: no such order"


def _cancel_order(data: dict[str, Any], order: str, reasons: list[str]) -> str:
    data["orders"][order]["status"] = "cancelled"
    data["orders"][order]["reasons"] = reasons
    return json.dumps(data["orders"][order])


def _move(data: dict[str, Any], member: str, city: str) -> str:
    data["members"][member]["city"] = city
    data["holidays"].append(f"{city} fair")
    return "moved"


def _grant(data: dict[str, Any], member: str, points: Any) -> str:
    data["members"][member]["points"] = points
    return "granted"


class Calculate:
    """The library has one of its own, whose texts of errors have this name too."""

    @staticmethod
    def invoke(data: dict[str, Any], expression: str) -> str:
        if not all(char in "0123456789+-*/(). " for char in expression):
            return "Error: invalid characters in expression"
        try:
            return str(round(float(eval(expression, {"__builtins__": None}, {})), 2))
        except Exception as error:
            return f"Error: {error}"

    @staticmethod
    def get_info() -> dict[str, Any]:
        return _tool("calculate", expression="string")


def _transfer(data: dict[str, Any], summary: str) -> str:
    return "Transfer successful"


TOOLS = [
    Tool(_find_member, "find_member", name="string"),
    Tool(_show_order, "show_order", order="string"),
    Tool(_cancel_order, "cancel_order", order="string", reasons="array"),
    Tool(_move, "move", member="string", city="string"),
    Tool(_grant, "grant", member="string", points="integer"),
    Calculate,
    Tool(_transfer, "transfer_to_human_agents", summary="string"),
]


def _task(number: int, outputs: tuple[str, ...], *actions: tuple[str, dict[str, Any]]) -> Task:
    made = [Action(name=name, kwargs=kwargs) for name, kwargs in actions]
    return Task(
        user_id=f"m{number}",
        actions=made,
        instruction=f"You are Member {number}.",
        outputs=list(outputs),
    )


def tasks(first: int, count: int) -> list[Task]:
    """Of each six: a cancellation, a move with an output, nothing, a look, a transfer, points."""
    made: list[Task] = []
    for i in range(first, first + count):
        order, member = {"order": f"o{i}"}, {"member": f"m{i}"}
        find, lost = ("find_member", {"name": f"Member {i}"}), {"order": "nowhere"}
        transfer = ("transfer_to_human_agents", {"summary": "angry"})
        kinds = (
            _task(i, (), ("cancel_order", {**order, "reasons": ["broken"]})),
            _task(i, ("1250.5",), ("move", {**member, "city": "Bruges"}), ("show_order", order)),
            _task(i, ()),
            _task(i, (), find, ("show_order", lost), ("show_order", {})),
            _task(i, (), ("move", {**member, "city": "Mons"}), transfer),
            _task(i, (), ("grant", {**member, "points": 1})),
        )
        made.append(kinds[i % 6])
    return made


def maker(splits: Mapping[str, Sequence[Task]]) -> Callable[..., Env]:
    """A function that makes an environment with the tasks of one of `splits`."""

    def make(strategy: str, model: str, split: str, provider: str | None, index: int | None) -> Env:
        if split not in splits:
            raise ValueError(f"no split {split}")
        user = (strategy, model, provider)
        env = Env(load, TOOLS, splits[split], "# Shop policy\nBe kind.", user, index)
        env.terminate_tools = ["transfer_to_human_agents"]
        return env

    return make
