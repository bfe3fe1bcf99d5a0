"""Environments with Gymnasium's and with tau-bench's interface, played as they are."""

from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Text
from support.episodes import agent, call, judge, serving
from support.hook_agents import Store as TauStore
from support.listed_environment import TOOL

from toolroll import Action, ActionError, StepResult, StopReason, Task, ToolCall, UsageError
from toolroll.agents.loop.adapt import (
    NOT_EXECUTED,
    GymStyleEnvironment,
    TauAction,
    TauStyleEnvironment,
    as_environment,
    is_gym_style,
)
from toolroll.agents.loop.environment_runner import DRAWN
from toolroll.testing import script


class Doors(gymnasium.Env[str, str]):
    """Behind one of the doors is a cat; looking costs a tenth."""

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own form
    observation_space = Text(200)
    action_space = Text(200)
    wiki = "Find the cat."
    tools_info = [TOOL]  # noqa: RUF012

    def __init__(self) -> None:
        self.actions: list[str] = []
        self.options: dict[str, Any] | None = None
        self.closed = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.options = options
        self.cat = int(self.np_random.integers(3))
        return "Three doors.", {"doors": 3}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if "wall" in action:
            raise ActionError("there is no door")
        self.actions.append(action)
        looks = len(self.actions)
        if "look" in action:
            text = f"The cat is behind door {self.cat}."
            return text, -0.1, False, looks > 3, {"looks": looks}
        return "Meow.", 1.0, True, False, {"found": True}

    def close(self) -> None:
        self.closed += 1


TASK = Task("doors", 4)


class Remote(Doors):
    async def close(self) -> None:  # type: ignore[override]
        self.closed += 1


@pytest.mark.parametrize("kind", [Doors, Remote])
async def test_an_episode(tokenizer: Any, kind: type[Doors]) -> None:
    env = kind()
    policy = script({"s": [call(at="left") + call(at="right"), "Door 1!"]})
    async with serving(tokenizer, policy) as (engine, model):
        result = await agent(model).asolve(env, task=TASK, seed=3, session_id="s")
        judge(result, engine, "s")
    assert env.actions == [
        '{"name": "look", "arguments": {"at": "left"}}',
        '{"name": "look", "arguments": {"at": "right"}}',
        "Door 1!",
    ]
    roles = "system user assistant tool tool assistant user"
    assert [message["role"] for message in result.messages] == roles.split()
    assert result.messages[3]["content"].startswith("The cat is behind door")
    assert result.reward == pytest.approx(0.8), "the sum of the steps"
    assert result.step_rewards == (pytest.approx(-0.2), 1.0)  # type: ignore[comparison-overlap]
    assert (result.stop_reason, env.closed) == (StopReason.DONE, 1)
    assert result.info == {"doors": 3, "looks": 2, "found": True}
    assert env.options == {"task_index": 4, "task_id": "doors"}


def test_a_reset_without_a_task_has_a_seed_and_no_options() -> None:
    cats: list[int] = []
    for seed in (1, 1, 2, 3, 4, 5):
        env = Doors()
        env.options = {}
        GymStyleEnvironment(env).reset(DRAWN, seed)
        assert env.options is None
        cats.append(env.cat)
    assert cats[0] == cats[1] and len(set(cats)) > 1


def test_calls_run_until_the_end_and_an_error_answers_its_own_call() -> None:
    """The result and the reward of the calls before it are kept: they were executed."""

    def step(*places: str) -> tuple[StepResult, int]:
        env = Doors()
        wrapped = GymStyleEnvironment(env)
        wrapped.reset(TASK, 0)
        calls = (ToolCall("look", {"at": place}, "", id=place) for place in places)
        return wrapped.step(Action("", tuple(calls))), len(env.actions)

    result, executed = step(*"012345")
    assert (result.done, executed) == (True, 4), "truncated"
    not_executed = [message["content"].startswith("Not executed") for message in result.messages]
    assert not_executed == [False] * 4 + [True] * 2
    result, _ = step("1", "wall", "2")
    assert [message["tool_call_id"] for message in result.messages] == ["1", "wall", "2"]
    assert result.messages[1]["content"] == "there is no door"
    assert result.reward == pytest.approx(-0.2)
    with pytest.raises(ActionError, match="there is no door"):
        step("wall", "1")


def test_actions_can_be_ones_own() -> None:
    def door(content: str, tool_call: ToolCall | None) -> int:
        if not content.isdigit():
            raise ActionError("say a number")
        return int(content)

    class Numbers(Doors):
        def step(self, action: Any) -> Any:
            return {"door": action}, 1, True, False, {}

    wrapped = GymStyleEnvironment(Numbers(), make_action=door)
    wrapped.reset(TASK, 0)
    assert wrapped.step(Action("2")).messages == [{"role": "user", "content": '{"door": 2}'}]
    for wrong, words in (("two", "say a number"), (" ", "empty")):
        with pytest.raises(ActionError, match=words):
            wrapped.step(Action(wrong))


def test_what_is_gymnasiums_kind() -> None:
    assert is_gym_style(gymnasium.wrappers.TimeLimit(Doors(), 3))
    assert not is_gym_style(Store()) and not is_gym_style(object())
    with pytest.raises(UsageError, match="Gymnasium's reset"):
        as_environment(object())


def tau_call(name: str) -> ToolCall:
    return ToolCall(name, {}, "{}")


class Store(TauStore):
    """Its steps name their action in their info."""

    def step(self, action: TauAction) -> Any:
        return SimpleNamespace(**(vars(super().step(action)) | {"info": {action.name: 1}}))


def test_calls_are_executed_until_the_episode_is_done() -> None:
    store = Store()
    env = TauStyleEnvironment(store)
    first = env.reset(Task("t", 3), 0)
    assert [message["content"] for message in first.messages] == ["Sell.", "Task 3."]
    step = env.step(Action("", (tau_call("look"), tau_call("buy"), tau_call("look"))))
    assert [message["content"] for message in step.messages] == ["look!", "buy!", NOT_EXECUTED]
    assert (step.reward, step.done, dict(step.info)) == (1.0, True, {"look": 1, "buy": 1})
    assert len(store.actions) == 2
    reply = env.step(Action("Hello."))
    assert reply.messages == [{"role": "user", "content": "respond!"}]
    assert store.actions[2:] == [TauAction("respond", {"content": "Hello."})]


def test_a_wrong_action_changes_nothing() -> None:
    store = Store()
    for action in (Action(" "), Action("", (tau_call("look"), tau_call("respond")))):
        with pytest.raises(ActionError):
            TauStyleEnvironment(store).step(action)
        assert store.actions == []
