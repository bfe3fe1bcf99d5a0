"""An environment with tau-bench's interface, adapted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from toolroll.agents.loop.adapt import NOT_EXECUTED, TauAction, TauStyleEnvironment
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import ActionError
from toolroll.rollout.types import Action, Task


def call(name: str) -> ToolCall:
    return ToolCall(name, {}, "{}")


class Shop:
    """Ends with `buy`, which earns what is asked for."""

    wiki = "Sell."

    def __init__(self) -> None:
        self.actions: list[TauAction] = []

    def reset(self, task_index: int | None) -> Any:
        return SimpleNamespace(observation=f"Task {task_index}.", info=None)

    def step(self, action: TauAction) -> Any:
        self.actions.append(action)
        done = action.name == "buy"
        return SimpleNamespace(
            observation=f"{action.name}!", reward=float(done), done=done, info={action.name: 1}
        )


def test_calls_are_executed_until_the_episode_is_done() -> None:
    shop = Shop()
    env = TauStyleEnvironment(shop)
    first = env.reset(Task("t", 3), 0)
    assert [message["content"] for message in first.messages] == ["Sell.", "Task 3."]
    step = env.step(Action("", (call("look"), call("buy"), call("look"))))
    assert [message["content"] for message in step.messages] == ["look!", "buy!", NOT_EXECUTED]
    assert (step.reward, step.done, dict(step.info)) == (1.0, True, {"look": 1, "buy": 1})
    assert len(shop.actions) == 2


def test_the_text_is_a_response() -> None:
    shop = Shop()
    step = TauStyleEnvironment(shop).step(Action("Hello."))
    assert step.messages == [{"role": "user", "content": "respond!"}]
    assert shop.actions == [TauAction("respond", {"content": "Hello."})]


@pytest.mark.parametrize("action", [Action(" "), Action("", (call("look"), call("respond")))])
def test_a_wrong_action_changes_nothing(action: Action) -> None:
    shop = Shop()
    with pytest.raises(ActionError):
        TauStyleEnvironment(shop).step(action)
    assert shop.actions == []
