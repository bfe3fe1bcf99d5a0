"""desk: the reference earns 1.0, nothing else does, and a wrong call is answered."""

import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from jsonschema_rs import meta

from toolroll import Action, EnvironmentOptions, StepResult, Task, ToolCall
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
from toolroll.environments.desk.generate import generate
from toolroll.environments.desk.tools import handwritten
from toolroll.rollout.errors import ActionError, UsageError, UserSimulatorError

TASKS = {task.id: task for task in DESK.tasks("test")}


def say(text: str) -> Action:
    return Action(text)


def call(name: str, arguments: Any, call_id: str = "c1") -> Action:
    return Action("", (ToolCall(name, arguments, "", id=call_id),))


@asynccontextmanager
async def desk(task: str | Task = "renew-one", **options: Any) -> AsyncIterator[Desk]:
    """A desk that was reset."""
    env = DESK.make(EnvironmentOptions(**options))
    await env.reset(TASKS[task] if isinstance(task, str) else task, 0)
    yield env
    await env.close()


async def play(task: Task, actions: list[Action], **options: Any) -> tuple[float, list[StepResult]]:
    """Play `actions` until done, then take leave until done."""
    results: list[StepResult] = []
    async with desk(task, **options) as env:
        for action in [*actions, *[say("Goodbye.")] * 6]:
            results.append(await env.step(action))
            if results[-1].done:
                break
    assert results[-1].done
    assert results[-1].reward is not None
    assert all(result.reward is None for result in results[:-1])
    return results[-1].reward, results


CHANGED = "the database is not in the reference's final state"


def worthless(task: Task) -> Iterator[tuple[list[Action], str]]:
    """Plans that earn nothing in any task, with a pattern of the reason."""
    yield [], ""
    yield [say("Rules A1 R1 R2 R3 R4 H1 H2 H3 F1 F2 may apply.")] * 5, ""
    yield [say("ok?")] * 5, ""
    for topic in TOPICS:
        yield [call("transfer_to_person", {"card": "L-1002", "topic": topic})], ""
    right = list(reference(task))
    yield [call("renew_loan", {"loan_id": "N01"}), *right], CHANGED
    yield [call("place_hold", {"card": "L-1008", "book_id": "B01"}), *right], CHANGED
    yield [call("cancel_hold", {"hold_id": "H02"}), *right], CHANGED
    yield [call("waive_fees", {"card": "L-1003"}), *right], CHANGED
    if task.data["told"]:
        quiet = [say("All settled.") if "Please note" in step.content else step for step in right]
        yield quiet, "the member was not told '.*"


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
async def test_the_reference_earns_one_and_nothing_else_does(task: Task) -> None:
    """Not nothing, too much, or the right actions without what must be told."""
    actions = list(reference(task))
    reward, results = await play(task, actions)
    assert (reward, len(results), results[-1].info) == (1.0, len(actions), {})
    assert not [m for r in results for m in r.messages if m["content"].startswith("Error")]
    for plan, reason in worthless(task):
        reward, results = await play(task, plan)
        assert reward == 0.0
        if reason:
            assert results[-1].info.keys() == {"reward_reason"}
            assert re.fullmatch(reason, results[-1].info["reward_reason"])


async def test_a_code_that_does_not_apply_is_the_reason() -> None:
    task = next(t for t in TASKS.values() if "R1" in " ".join(t.data["told"]).upper())
    reward, results = await play(task, [say("H3."), *reference(task)])
    assert reward == 0.0
    reason = "the member was told codes that do not apply: h3"
    assert results[-1].info == {"reward_reason": reason}


@pytest.mark.parametrize(
    ("wanted", "reply", "is_said"),
    [
        ("R2", "Sorry, rule r2.", True),
        ("R2", "Sorry, rule R21", False),
        ("3", "You are number 3.", True),
        ("3", "You are the 3rd in the queue", True),
        ("3.50", "You owe €3.50!", True),
        ("3", "It is 2031-03-3", False),
        ("3.50", "That was 3.50, now gone.", True),
        ("1250.00", "1,250.00", True),
        ("2031-03-31", "until ２０３１-０３-３１", True),
    ],
)
def test_what_a_reply_tells(wanted: str, reply: str, is_said: bool) -> None:
    assert is_told(wanted, ["nothing", reply]) is is_said


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("find_member", {"card": "L-9"}, "no member"),
        ("find_member", {}, "exactly these arguments: card"),
        ("find_member", None, "takes an object"),
        ("search_books", {"title": 7}, "must be a text"),
        ("search_books", {"title": "\ud800"}, "must be a text"),
        ("search_books", {"title": "a" * 201}, "must be a text"),
        ("renew_loan", {"loan_id": "N99"}, "no loan 'N99'"),
        ("place_hold", {"card": "L-9", "book_id": "B01"}, "no member"),
        ("place_hold", {"card": "L-1001", "book_id": "B99"}, "no book"),
        ("place_hold", {"card": "L-1001", "book_id": "B05"}, "already has a hold"),
        ("cancel_hold", {"hold_id": "H99"}, "no hold"),
        ("transfer_to_person", {"card": "L-1001", "topic": "no"}, "must be one of lost_item"),
        ("transfer_to_person", {"card": "x", "topic": "complaint"}, "no member"),
        ("drop_tables", {}, "there is no tool 'drop_tables'"),
    ],
)
async def test_a_wrong_call_ends_nothing(name: str, arguments: Any, words: str) -> None:
    async with desk() as env:
        result = await env.step(call(name, arguments, "id7"))
        (message,) = result.messages
        assert (message["role"], message["tool_call_id"]) == ("tool", "id7")
        assert message["content"].startswith("Error: ") and words in message["content"]
        assert not result.done
        assert env.metrics()["tool_errors"] == 1


def test_a_database_is_changed_by_its_own_calls_only() -> None:
    database, other = open_database(), open_database()
    before = final_state(other)
    assert final_state(database) == before
    assert call_tool(database, "search_books", {"title": "'; DROP TABLE books; --"}) == []
    with pytest.raises(ToolError):
        call_tool(database, "renew_loan", {"loan_id": "N01' OR '1'='1"})
    assert final_state(database) == before, "SQL in an argument is text"
    call_tool(database, "renew_loan", {"loan_id": "N02"})
    assert final_state(database) != final_state(other) == before
    database.close()
    other.close()


async def test_calls_after_a_transfer_in_the_same_step_are_not_run() -> None:
    transfer = call("transfer_to_person", {"card": "L-1006", "topic": "lost_item"}, "a")
    renew = call("renew_loan", {"loan_id": "N10"}, "b")
    async with desk("lost-book") as env:
        result = await env.step(Action("", transfer.tool_calls + renew.tool_calls))
    assert [message["tool_call_id"] for message in result.messages] == ["a", "b"]
    assert "not run" in result.messages[1]["content"]
    assert (result.done, result.reward) == (True, 1.0)


async def test_two_episodes_at_once_do_not_meet() -> None:
    *right, last = reference(TASKS["renew-one"])
    async with desk() as env, desk() as other:
        for action in right:
            await env.step(action)
        await other.step(say("No."))
        assert (await other.step(say("No."))).reward == 0.0
        assert (await env.step(last)).reward == 1.0


async def test_wrong_steps_and_a_users_failure_are_raised() -> None:
    with pytest.raises(UsageError, match="before reset"):
        await DESK.make(EnvironmentOptions()).step(say("hi"))
    async with desk() as env:
        transfer = call("transfer_to_person", {"card": "L-1001", "topic": "complaint"})
        assert (await env.step(transfer)).reward == 0.0
        for action in (say("2031-03-31"), call("renew_loan", {"loan_id": "N02"})):
            with pytest.raises(UsageError, match="is over"):
                await env.step(action)
        await env.close()  # and once more at the end
    async with desk("ask-due") as env:
        with pytest.raises(ActionError, match="empty"):
            await env.step(say(" \n"))
    async with desk("ask-due", user=lambda seed: ScriptedUser(["hello"])) as env:
        with pytest.raises(UserSimulatorError):
            await env.step(say("hi"))


async def test_another_user_plays_with_the_instruction() -> None:
    instructions: list[str] = []

    class Listening(ScriptedUser):
        async def reset(self, instruction: str) -> str:
            instructions.append(instruction)
            return await super().reset(instruction)

    user = lambda seed: Listening(["When is it due?", "L-1006, 4431.", STOP_MARKER])
    actions = [say("Card?"), say("It is 2031-03-25.")]
    reward, results = await play(TASKS["ask-due"], actions, user=user)
    assert (reward, len(results)) == (1.0, 2)
    assert all(word in instructions[0] for word in ("Long Orchard", "L-1006", "4431"))


def test_the_factory() -> None:
    assert 30 <= len(TASKS) == len(DESK.tasks("test"))
    assert DESK.splits == ("test", "train", "held-out")
    assert [task.index for task in DESK.tasks("test")] == list(range(len(TASKS)))
    assert str(len(TASKS)) in DESK.description
    with pytest.raises(UsageError, match="no split 'dev'"):
        DESK.tasks("dev")
    with pytest.raises(UsageError, match="policy must be full or brief, not 'none'"):
        DESK.make(EnvironmentOptions(settings={"policy": "none"}))


@pytest.mark.parametrize("policy", ["full", "brief"])
async def test_what_reset_returns(policy: str) -> None:
    """The brief policy leaves the rules out."""
    env = DESK.make(EnvironmentOptions(settings={"policy": policy}))
    observation = await env.reset(TASKS["renew-one"], 0)
    await env.close()
    assert [message["role"] for message in observation.messages] == ["system", "user"]
    system = observation.messages[0]["content"]
    assert TODAY in system
    assert (len(system) < 100, "R1" in system) == (policy == "brief", policy == "full")
    assert [tool["function"]["name"] for tool in observation.tools] == list(TOOLS)
    for tool in observation.tools:
        meta.validate(tool["function"]["parameters"])
        assert tool["function"]["description"]


# --- generated tasks ------------------------------------------------------------------------------


ROWS = enumerate(generate(200, held_out=False))
PART = [Task(row["id"], index, "train", row) for index, row in ROWS]
HELD_OUT = DESK.tasks("held-out")


async def reward_of(task: Task, actions: list[Action]) -> float:
    return (await play(task, actions))[0]


async def test_generated_references_earn_one_and_doing_nothing_zero() -> None:
    assert {await reward_of(task, list(reference(task))) for task in PART} == {1.0}
    assert {await reward_of(task, []) for task in HELD_OUT[:200]} == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "held-out"])
async def test_the_references_of_a_thousand_tasks_earn_one(split: str) -> None:
    tasks = DESK.tasks(split)[:1000]
    assert len(tasks) == 1000
    assert {await reward_of(task, list(reference(task))) for task in tasks} == {1.0}


async def test_each_call_and_each_reply_of_the_references_is_needed() -> None:
    """Without one write or one reply, no episode earns anything."""
    writes = {"renew_loan", "place_hold", "cancel_hold", "waive_fees", "transfer_to_person"}
    left_out = 0
    for task in PART[:60]:
        actions = list(reference(task))
        for number, action in enumerate(actions):
            texts = [text for text in task.data["told"] if text in action.content]
            others = " ".join(other.content for other in actions if other is not action)
            is_write = any(call.name in writes for call in action.tool_calls)
            if not (texts or is_write) or any(text in others for text in texts):
                continue
            left_out += 1
            instead = [Action("Hm.")] if texts else []
            rest = [*actions[:number], *instead, *actions[number + 1 :]]
            assert await reward_of(task, rest) == 0.0, (task.id, number)
    assert left_out > 60


def entities(*databases: Any) -> set[str]:
    """Cards, names, ids and titles."""
    tables = ("members", "books", "loans", "holds")
    return {
        value for rows in databases for table in tables for row in rows[table] for value in row[:2]
    }


def test_generated_tasks_are_reproducible_own_and_not_rare() -> None:
    assert generate(20, held_out=False) == [task.data for task in PART[:20]]
    train, held_out = (entities(*(task.data["rows"] for task in of)) for of in (PART, HELD_OUT))
    assert not (train | held_out) & entities(handwritten())
    assert not {name for name in train & held_out if name.startswith(("L-", "The "))}
    codes = Counter(task.data["told"][0] for task in HELD_OUT if task.data["told"])
    rules = ["A1", "F1", "F2", "H1", "H2", "H3", "R1", "R2", "R3", "R4"]
    assert all(codes[code] >= 20 for code in rules)
    kinds = Counter(task.data["requests"][0]["kind"] for task in HELD_OUT)
    assert min(kinds.values()) >= 20
    assert 0.2 < sum(len(task.data["requests"]) == 2 for task in HELD_OUT) / 1000 < 0.4
