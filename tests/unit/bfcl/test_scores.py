"""BFCL multi-turn: reference actions pass, and on every kind of trajectory our score is the
official checker's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.bfcl_official import official_verdicts

from toolroll.environments.bfcl import (
    MULTI_TURN_BASE,
    MULTI_TURN_LONG_CONTEXT,
    MULTI_TURN_MISS_FUNC,
    MULTI_TURN_MISS_PARAM,
)
from toolroll.environments.bfcl.environment import BfclFactory
from toolroll.parsers.types import ToolCall
from toolroll.rollout.types import Action, EnvironmentOptions, Task

FACTORIES = {
    factory.category: factory
    for factory in (
        MULTI_TURN_BASE,
        MULTI_TURN_MISS_FUNC,
        MULTI_TURN_MISS_PARAM,
        MULTI_TURN_LONG_CONTEXT,
    )
}
TOO_LONG = {"multi_turn_long_context": {38, 46}}
"""Entries with 34 calls in one turn: one call a step runs into BFCL's limit of 20 steps, which
its checker does not see.
"""

Turns = list[list[ToolCall]]


def turns_of(factory: BfclFactory, task: Task) -> Turns:
    """The reference's calls, by user turn."""
    turns: Turns = [[]]
    for action in factory.reference(task):
        if action.tool_calls:
            turns[-1] += action.tool_calls
        else:
            turns.append([])
    return turns[:-1]


def play(
    factory: BfclFactory, task: Task, turns: Turns, *, together: bool = False
) -> tuple[float, str]:
    """The reward, and why it failed; one call a step, or a turn's calls `together`."""
    env = factory.make(EnvironmentOptions())
    env.reset(task, 0)
    for turn in turns:
        for calls in [turn] if together and turn else [[call] for call in turn]:
            result = env.step(Action("", tuple(calls)))
            if result.done:
                return result.reward or 0.0, str(result.info.get("failure", ""))
        result = env.step(Action("Done."))
        if result.done:
            return result.reward or 0.0, str(result.info.get("failure", ""))
    raise AssertionError("the episode did not end")


@pytest.mark.parametrize(
    ("category", "passed"), [(name, 198 if "long" in name else 200) for name in FACTORIES]
)
def test_reference_passes(category: str, passed: int) -> None:
    factory = FACTORIES[category]
    found = {
        task.index: play(factory, task, turns_of(factory, task)) for task in factory.tasks("test")
    }
    failed = {index for index, (reward, _) in found.items() if reward != 1.0}
    assert len(found) - len(failed) == passed
    assert failed == TOO_LONG.get(category, set())
    assert all("more than 20 steps" in found[index][1] for index in failed)
    for index in failed:
        task = factory.tasks("test")[index]
        assert play(factory, task, turns_of(factory, task), together=True) == (1.0, "")


def drop(turns: Turns, rng: random.Random) -> Turns:
    at = rng.choice([index for index, turn in enumerate(turns) if turn])
    gone = rng.randrange(len(turns[at]))
    return [
        [call for place, call in enumerate(turn) if (index, place) != (at, gone)]
        for index, turn in enumerate(turns)
    ]


def shuffle(turns: Turns, rng: random.Random) -> Turns:
    return [rng.sample(turn, len(turn)) for turn in turns]


def corrupt(turns: Turns, rng: random.Random) -> Turns:
    at = rng.choice([index for index, turn in enumerate(turns) if turn])
    place = rng.randrange(len(turns[at]))
    call = turns[at][place]
    changed: dict[str, Any] = dict(call.arguments or {})
    if changed:
        name = rng.choice(sorted(changed))
        value = changed[name]
        changed[name] = (
            f"{value}x"
            if isinstance(value, str)
            else (value + 1 if isinstance(value, int | float) else [])
        )
    else:
        changed["unexpected"] = 1
    wrong = ToolCall(call.name, changed, "")
    return [
        [wrong if (index, spot) == (at, place) else old for spot, old in enumerate(turn)]
        for index, turn in enumerate(turns)
    ]


def as_python(turns: Turns) -> list[list[str]]:
    return [
        [
            f"{call.name}({', '.join(f'{k}={v!r}' for k, v in (call.arguments or {}).items())})"
            for call in turn
        ]
        for turn in turns
    ]


def trajectories(factory: BfclFactory) -> Sequence[tuple[str, Task, Turns]]:
    found = []
    for task in factory.tasks("test"):
        rng = random.Random(f"{factory.category}/{task.index}")
        turns = turns_of(factory, task)
        kinds = {"reference": turns, "nothing": [[] for _ in turns]}
        kinds |= {
            "dropped": drop(turns, rng),
            "shuffled": shuffle(turns, rng),
            "corrupted": corrupt(turns, rng),
        }
        found += [(kind, task, made) for kind, made in kinds.items()]
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("category", list(FACTORIES))
def test_scores_are_the_official_checkers(category: str, tmp_path: Path) -> None:
    factory = FACTORIES[category]
    played = trajectories(factory)
    official = official_verdicts(
        [
            {"category": category, "index": task.index, "turns": as_python(turns)}
            for _, task, turns in played
        ],
        tmp_path,
    )
    assert len(official) == len(played) == 1000
    ours = [
        play(factory, task, turns, together=task.index in TOO_LONG.get(category, ()))[0] == 1.0
        for _, task, turns in played
    ]
    differing = [
        (kind, task.index)
        for (kind, task, _), a, b in zip(played, ours, official, strict=True)
        if a != b
    ]
    assert differing == []
    by_kind = {
        kind: sum(ok for (name, _, _), ok in zip(played, official, strict=True) if name == kind)
        for kind, _, _ in played
    }
    assert by_kind["reference"] == 200
    assert by_kind["nothing"] == 0
    assert 0 < by_kind["shuffled"] < 200
    assert by_kind["dropped"] < 200
    assert by_kind["corrupted"] < 200


def test_a_second_reset_counts_from_zero() -> None:
    env = MULTI_TURN_BASE.make(EnvironmentOptions())
    task = MULTI_TURN_BASE.tasks("test")[0]
    env.reset(task, 0)
    env.step(Action("", (ToolCall("no_such_tool", {}, ""),)))
    assert env.metrics()["calls"] == env.metrics()["tool_errors"] == 1.0
    env.reset(task, 0)
    assert env.metrics()["calls"] == env.metrics()["tool_errors"] == 0.0
