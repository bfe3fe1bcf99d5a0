"""desk: the reference earns 1.0, nothing else does, and no argument of a model breaks it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import meta

from toolroll.agents.users import STOP_MARKER, ScriptedUser
from toolroll.environments.desk import (
    DESK,
    TODAY,
    TOOLS,
    TOPICS,
    Desk,
    ToolError,
    call_tool,
    final_state,
    is_told,
    open_database,
    reference,
)
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import ActionError, UsageError, UserSimulatorError
from toolroll.rollout.types import Action, EnvironmentOptions, StepResult, Task

TASKS = {task.id: task for task in DESK.tasks("test")}


def say(text: str) -> Action:
    return Action(text)


def call(name: str, arguments: Any, call_id: str = "c1") -> Action:
    return Action("", (ToolCall(name, arguments, "", id=call_id),))


async def play(
    task: Task, actions: list[Action], options: EnvironmentOptions | None = None
) -> tuple[float, list[StepResult]]:
    """Play `actions` until done, then take leave until done."""
    env = DESK.make(options or EnvironmentOptions())
    await env.reset(task, 0)
    results: list[StepResult] = []
    for action in [*actions, *[say("Goodbye.")] * 6]:
        results.append(await env.step(action))
        if results[-1].done:
            break
    await env.close()
    assert results[-1].done
    assert results[-1].reward is not None
    assert all(result.reward is None for result in results[:-1])
    return results[-1].reward, results


def reference_actions(task: Task) -> list[Action]:
    return list(reference(task))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
async def test_the_reference_earns_one_without_tool_errors(task: Task) -> None:
    actions = reference_actions(task)
    reward, results = await play(task, actions)
    assert reward == 1.0
    assert len(results) == len(actions)
    assert not [m for r in results for m in r.messages if m["content"].startswith("Error")]
    assert results[-1].info == {}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
async def test_the_floor_is_zero(task: Task) -> None:
    codes = say("Rules A1 R1 R2 R3 R4 H1 H2 H3 F1 F2 may apply.")
    lazy = [[], [codes] * 5, [say("ok?")] * 5]
    lazy += [[call("transfer_to_person", {"card": "L-1002", "topic": topic})] for topic in TOPICS]
    assert [(await play(task, actions))[0] for actions in lazy] == [0.0] * len(lazy)


@pytest.mark.parametrize("task", [t for t in TASKS.values() if t.data["told"]], ids=lambda t: t.id)
async def test_saying_nothing_of_what_must_be_told_earns_nothing(task: Task) -> None:
    quiet = [
        say("All settled.") if "Please note" in step.content else step for step in reference(task)
    ]
    reward, results = await play(task, quiet)
    assert reward == 0.0
    assert results[-1].info["reward_reason"].startswith("the member was not told '")


async def test_a_code_that_does_not_apply_is_the_reason() -> None:
    task = next(t for t in TASKS.values() if "R1" in " ".join(t.data["told"]).upper())
    reward, results = await play(task, [say("H3."), *reference_actions(task)])
    assert reward == 0.0
    reason = "the member was told codes that do not apply: h3"
    assert results[-1].info == {"reward_reason": reason}


WRITES = [
    ("renew_loan", {"loan_id": "N01"}),
    ("place_hold", {"card": "L-1008", "book_id": "B01"}),
    ("cancel_hold", {"hold_id": "H02"}),
]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
async def test_one_write_too_many_earns_nothing(task: Task) -> None:
    for name, arguments in [*WRITES, ("waive_fees", {"card": "L-1003"})]:
        reward, results = await play(task, [call(name, arguments), *reference_actions(task)])
        assert reward == 0.0
        reason = "the database is not in the reference's final state"
        assert results[-1].info == {"reward_reason": reason}


REFUSED = {
    "renew-waited-for": ("renew_loan", {"loan_id": "N01"}),
    "renew-third-time": ("renew_loan", {"loan_id": "N03"}),
    "renew-very-late": ("renew_loan", {"loan_id": "N07"}),
    "hold-reference": ("place_hold", {"card": "L-1001", "book_id": "B04"}),
    "hold-too-many": ("place_hold", {"card": "L-1007", "book_id": "B05"}),
    "waive-too-much": ("waive_fees", {"card": "L-1007"}),
    "wrong-postcode": ("renew_loan", {"loan_id": "N02"}),
    "neighbours-card": ("waive_fees", {"card": "L-1008"}),
}


@pytest.mark.parametrize("task_id", REFUSED)
async def test_doing_what_a_rule_forbids_earns_nothing(task_id: str) -> None:
    name, arguments = REFUSED[task_id]
    actions = reference_actions(TASKS[task_id])
    reward, results = await play(
        TASKS[task_id], [*actions[:2], call(name, arguments), *actions[2:]]
    )
    # the tool lets it happen; the rules do not
    assert not results[2].messages[0]["content"].startswith("Error")
    assert reward == 0.0


async def test_wrong_arguments_earn_nothing() -> None:
    task = TASKS["renew-one"]
    wrong = [
        call("renew_loan", {"loan_id": "N03"})
        if any(c.name == "renew_loan" for c in a.tool_calls)
        else a
        for a in reference_actions(task)
    ]
    assert (await play(task, wrong))[0] == 0.0


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("find_member", {"card": "L-9"}, "no member"),
        ("find_member", {}, "exactly these arguments: card"),
        ("find_member", {"card": "L-1001", "data": 1}, "exactly these arguments"),
        ("find_member", None, "takes an object"),
        ("find_member", ["L-1001"], "takes an object"),
        ("search_books", {"title": 7}, "must be a text"),
        ("search_books", {"title": "\ud800"}, "must be a text"),
        ("search_books", {"title": "a" * 201}, "must be a text"),
        ("renew_loan", {"loan_id": "N99"}, "no loan 'N99'"),
        ("place_hold", {"card": "L-9", "book_id": "B01"}, "no member"),
        ("place_hold", {"card": "L-1001", "book_id": "B99"}, "no book"),
        ("place_hold", {"card": "L-1001", "book_id": "B05"}, "already has a hold"),
        ("cancel_hold", {"hold_id": "H99"}, "no hold"),
        ("waive_fees", {"card": True}, "must be a text"),
        (
            "transfer_to_person",
            {"card": "L-1001", "topic": "boredom"},
            "topic must be one of lost_item",
        ),
        ("transfer_to_person", {"card": "x", "topic": "complaint"}, "no member"),
        ("drop_tables", {}, "there is no tool 'drop_tables'"),
    ],
)
async def test_what_is_wrong_with_a_call_is_an_observation(
    name: str, arguments: Any, says: str
) -> None:
    env = DESK.make(EnvironmentOptions())
    await env.reset(TASKS["renew-one"], 0)
    result = await env.step(call(name, arguments, "id7"))
    (message,) = result.messages
    assert message["role"] == "tool"
    assert message["tool_call_id"] == "id7"
    assert message["content"].startswith("Error: ")
    assert says in message["content"]
    assert not result.done
    assert env.metrics()["tool_errors"] == 1
    await env.close()


def test_sql_in_an_argument_is_text() -> None:
    db = open_database()
    before = final_state(db)
    assert call_tool(db, "search_books", {"title": "'; DROP TABLE books; --"}) == []
    with pytest.raises(ToolError):
        call_tool(db, "renew_loan", {"loan_id": "N01' OR '1'='1"})
    assert final_state(db) == before
    db.close()


def test_two_databases_are_equal_and_separate() -> None:
    one, two = open_database(), open_database()
    assert final_state(one) == final_state(two)
    call_tool(one, "renew_loan", {"loan_id": "N02"})
    assert final_state(one) != final_state(two)
    one.close()
    two.close()


async def test_the_same_episode_twice_is_the_same() -> None:
    task = TASKS["swap-holds"]
    assert await play(task, reference_actions(task)) == await play(task, reference_actions(task))


async def test_two_episodes_at_once_do_not_meet() -> None:
    task = TASKS["renew-one"]
    one, two = DESK.make(EnvironmentOptions()), DESK.make(EnvironmentOptions())
    await asyncio.gather(one.reset(task, 0), two.reset(task, 0))
    right, wrong = reference_actions(task), [say("No.")] * 2
    for action in right[:-1]:
        await one.step(action)
    for action in wrong:
        last = await two.step(action)
    assert last.reward == 0.0  # pyright: ignore[reportPossiblyUnboundVariable]
    assert (await one.step(right[-1])).reward == 1.0
    await asyncio.gather(one.close(), two.close())


async def test_after_done_there_is_no_step() -> None:
    task = TASKS["renew-one"]
    env = DESK.make(EnvironmentOptions())
    with pytest.raises(UsageError, match="before reset"):
        await env.step(say("hi"))
    await env.reset(task, 0)
    assert (
        await env.step(call("transfer_to_person", {"card": "L-1001", "topic": "complaint"}))
    ).reward == 0.0
    for action in (say("2031-03-31"), call("renew_loan", {"loan_id": "N02"})):
        with pytest.raises(UsageError, match="is over"):
            await env.step(action)
    await env.close()
    await env.close()


async def test_calls_after_a_transfer_in_the_same_step_are_not_run() -> None:
    task = TASKS["lost-book"]
    env = DESK.make(EnvironmentOptions())
    await env.reset(task, 0)
    calls = (
        ToolCall("transfer_to_person", {"card": "L-1006", "topic": "lost_item"}, "", id="a"),
        ToolCall("renew_loan", {"loan_id": "N10"}, "", id="b"),
    )
    result = await env.step(Action("", calls))
    assert [message["tool_call_id"] for message in result.messages] == ["a", "b"]
    assert "not run" in result.messages[1]["content"]
    assert (result.done, result.reward) == (True, 1.0)
    await env.close()


async def test_a_failed_transfer_does_not_end_the_episode() -> None:
    env = DESK.make(EnvironmentOptions())
    await env.reset(TASKS["lost-book"], 0)
    assert not (await env.step(call("transfer_to_person", {"topic": "lost_item"}))).done
    await env.close()


async def test_an_empty_reply_is_the_models_fault() -> None:
    env = DESK.make(EnvironmentOptions())
    await env.reset(TASKS["ask-due"], 0)
    with pytest.raises(ActionError, match="empty"):
        await env.step(say(" \n"))
    await env.close()


async def test_another_user_plays_with_the_instruction() -> None:
    heard: list[str] = []

    class Listening(ScriptedUser):
        async def reset(self, instruction: str) -> str:
            heard.append(instruction)
            return await super().reset(instruction)

    options = EnvironmentOptions(
        user=lambda seed: Listening(["When is it due?", "L-1006, 4431.", STOP_MARKER])
    )
    reward, results = await play(
        TASKS["ask-due"], [say("Card?"), say("It is 2031-03-25.")], options
    )
    assert reward == 1.0
    assert len(results) == 2
    assert "Long Orchard" in heard[0]
    assert "L-1006" in heard[0]
    assert "4431" in heard[0]


async def test_a_users_failure_passes_through() -> None:
    env = DESK.make(EnvironmentOptions(user=lambda seed: ScriptedUser(["hello"])))
    await env.reset(TASKS["ask-due"], 0)
    with pytest.raises(UserSimulatorError):
        await env.step(say("hi"))
    await env.close()


@pytest.mark.parametrize(
    ("wanted", "reply", "told"),
    [
        ("R2", "Sorry, rule r2.", True),
        ("R2", "Sorry, rule R21", False),
        ("3", "You are number 3.", True),
        ("3", "You are number 13.", False),
        ("3", "You are the 3rd in the queue", True),
        ("3.50", "You owe €3.50!", True),
        ("R2", "(rule-R2)", True),
        ("3", "You owe 3.50", False),
        ("3", "It is 2031-03-3", False),
        ("3.50", "That was 3.50, now gone.", True),
        ("3.50", "13.50", False),
        ("1250.00", "1,250.00", True),
        ("2031-03-31", "until ２０３１-０３-３１", True),
        ("2031-03-31", "2031-03-310", False),
    ],
)
def test_told(wanted: str, reply: str, told: bool) -> None:
    assert is_told(wanted, ["nothing", reply]) is told


def test_the_factory() -> None:
    assert 30 <= len(TASKS) == len(DESK.tasks("test"))
    assert DESK.splits == ("test", "train", "held-out")
    assert [task.index for task in DESK.tasks("test")] == list(range(len(TASKS)))
    assert DESK.missing() is None
    assert isinstance(DESK.make(EnvironmentOptions()), Desk)
    assert str(len(TASKS)) in DESK.description
    with pytest.raises(UsageError, match="no split 'dev'"):
        DESK.tasks("dev")
    with pytest.raises(UsageError, match="only the setting policy, but got: speed"):
        DESK.make(EnvironmentOptions(settings={"speed": 2}))
    with pytest.raises(UsageError, match="policy must be full or brief, not 'none'"):
        DESK.make(EnvironmentOptions(settings={"policy": "none"}))


async def test_the_brief_policy_leaves_the_rules_out() -> None:
    env = DESK.make(EnvironmentOptions(settings={"policy": "brief"}))
    (system, _) = (await env.reset(TASKS["renew-one"], 0)).messages
    await env.close()
    assert TODAY in system["content"]
    assert len(system["content"]) < 100
    assert "R1" not in system["content"]


async def test_what_reset_returns() -> None:
    env = DESK.make(EnvironmentOptions())
    observation = await env.reset(TASKS["renew-one"], 0)
    assert [message["role"] for message in observation.messages] == ["system", "user"]
    assert TODAY in observation.messages[0]["content"]
    assert [tool["function"]["name"] for tool in observation.tools] == list(TOOLS)
    for tool in observation.tools:
        meta.validate(tool["function"]["parameters"])
        assert tool["function"]["description"]
    await env.close()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["L-1001", "B05", "N02", "H03", "complaint", "\ud800", "\0"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["card", "title", "loan_id", "book_id", "hold_id", "topic", "db", "self"])
CALLS = st.builds(
    lambda name, arguments: ToolCall(name, arguments, "", id="x"),
    st.sampled_from([*TOOLS, "nothing"]) | st.text(max_size=5),
    JSON | st.dictionaries(KEYS, JSON, max_size=3),
)
ACTIONS = st.builds(Action, st.text(max_size=20), st.lists(CALLS, max_size=3).map(tuple))


@given(st.lists(ACTIONS, max_size=8), st.sampled_from(list(TASKS.values())))
def test_no_action_raises_anything_but_action_error(actions: list[Action], task: Task) -> None:
    async def run() -> None:
        env = DESK.make(EnvironmentOptions())
        await env.reset(task, 0)
        for action in actions:
            try:
                result = await env.step(action)
            except ActionError:
                continue
            expected = len(action.tool_calls) or 1
            assert len(result.messages) == expected
            assert all(isinstance(message["content"], str) for message in result.messages)
            if result.done:
                break
        await env.close()

    asyncio.run(run())
