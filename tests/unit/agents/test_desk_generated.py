"""The generated tasks of the desk: their references, and what they share with other tasks."""

from __future__ import annotations

from collections import Counter

import pytest
from support.tau import play

from toolroll.environments.desk import DESK, reference
from toolroll.environments.desk.generate import generate
from toolroll.environments.desk.tools import handwritten
from toolroll.rollout.types import Action, EnvironmentOptions, Task

ROWS = enumerate(generate(200, held_out=False))
PART = [Task(row["id"], index, "train", row) for index, row in ROWS]
HELD_OUT = DESK.tasks("held-out")


async def reward(task: Task, actions: list[Action]) -> float | None:
    """Play the actions, then take leave until done."""
    result = await play(
        DESK.make(EnvironmentOptions()), task, [*actions, *[Action("Goodbye.")] * 6]
    )
    assert result.done
    return result.reward


async def test_the_references_earn_one() -> None:
    assert {await reward(task, list(reference(task))) for task in PART} == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "held-out"])
async def test_the_references_of_a_thousand_tasks_earn_one(split: str) -> None:
    tasks = DESK.tasks(split)[:1000]
    assert len(tasks) == 1000
    assert {await reward(task, list(reference(task))) for task in tasks} == {1.0}


async def test_doing_nothing_earns_nothing_in_generated_tasks() -> None:
    rewards = Counter([await reward(task, []) for task in HELD_OUT[:200]])
    assert rewards == {0.0: 200}


async def test_each_call_and_each_reply_of_the_references_is_needed() -> None:
    """Without one write or one reply, no episode earns anything."""
    writes = {"renew_loan", "place_hold", "cancel_hold", "waive_fees", "transfer_to_person"}
    left_out = 0
    for task in PART[:60]:
        actions = list(reference(task))
        for number, action in enumerate(actions):
            texts = [text for text in task.data["told"] if text in action.content]
            if not texts and not any(call.name in writes for call in action.tool_calls):
                continue
            others = " ".join(other.content for other in actions if other is not action)
            if any(text in others for text in texts):
                continue
            left_out += 1
            instead = [Action("Hm.")] if texts else []
            rest = [*actions[:number], *instead, *actions[number + 1 :]]
            assert await reward(task, rest) == 0.0, (task.id, number)
    assert left_out > 60


def test_tasks_are_the_same_each_time() -> None:
    assert generate(20, held_out=False) == [task.data for task in PART[:20]]


def entities(tasks: list[Task]) -> set[str]:
    """Return cards, names, ids and titles."""
    names = set()
    for task in tasks:
        rows = task.data["rows"]
        for card, name, *_ in rows["members"]:
            names |= {card, name}
        for table in ("books", "loans", "holds"):
            names |= {row[0] for row in rows[table]}
        names |= {row[1] for row in rows["books"]}
    return names


def test_tasks_share_no_entity_with_those_of_other_splits() -> None:
    rows = handwritten()
    tables = ("members", "books", "loans", "holds")
    own = {value for table in tables for row in rows[table] for value in row[:2]}
    train, held_out = entities(PART), entities([*HELD_OUT])
    assert not (train | held_out) & own
    assert not {name for name in train & held_out if name.startswith(("L-", "The "))}


def test_no_outcome_is_rare() -> None:
    codes = Counter(task.data["told"][0] for task in HELD_OUT if task.data["told"])
    rules = ["A1", "F1", "F2", "H1", "H2", "H3", "R1", "R2", "R3", "R4"]
    assert all(codes[code] >= 20 for code in rules)
    kinds = Counter(task.data["requests"][0]["kind"] for task in HELD_OUT)
    assert min(kinds.values()) >= 20
    assert 0.2 < sum(len(task.data["requests"]) == 2 for task in HELD_OUT) / 1000 < 0.4
