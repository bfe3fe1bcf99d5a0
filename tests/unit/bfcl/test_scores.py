"""BFCL multi-turn: reference actions pass, and on every kind of trajectory our score is the
official checker's."""

import random
from collections import Counter
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
from toolroll.rollout.environment import Action, EnvironmentOptions, Task

BASE, LONG = MULTI_TURN_BASE, MULTI_TURN_LONG_CONTEXT
ALL = (BASE, MULTI_TURN_MISS_FUNC, MULTI_TURN_MISS_PARAM, LONG)
FACTORIES = {factory.category: factory for factory in ALL}
TOO_LONG = {"multi_turn_long_context": {38, 46}}
"""Entries with 34 calls in one turn: one call a step runs into BFCL's limit of 20 steps, which
its checker does not see."""

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


def play(factory: Any, task: Task, turns: Turns, *, together: bool = False) -> tuple[float, str]:
    """The reward, and why it failed; one call a step, or a turn's calls `together`."""
    env = factory.make(EnvironmentOptions())
    env.reset(task, 0)
    for turn in turns:
        steps = [turn] if together and turn else [[call] for call in turn]
        for action in (*(Action("", tuple(calls)) for calls in steps), Action("Done.")):
            result = env.step(action)
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


def chosen(turns: Turns, rng: random.Random) -> tuple[int, int]:
    """The place of a call: its turn, and its place there."""
    turn = rng.choice([index for index, calls in enumerate(turns) if calls])
    return turn, rng.randrange(len(turns[turn]))


def drop(turns: Turns, rng: random.Random) -> Turns:
    turn, place = chosen(turns, rng)
    changed = [list(calls) for calls in turns]
    del changed[turn][place]
    return changed


def shuffle(turns: Turns, rng: random.Random) -> Turns:
    return [rng.sample(turn, len(turn)) for turn in turns]


def corrupt(turns: Turns, rng: random.Random) -> Turns:
    turn, place = chosen(turns, rng)
    call = turns[turn][place]
    arguments: dict[str, Any] = dict(call.arguments or {}) or {"unexpected": 0}
    name = rng.choice(sorted(arguments))
    value = arguments[name]
    other: Any = value + 1 if isinstance(value, int | float) else []
    arguments[name] = f"{value}x" if isinstance(value, str) else other
    changed = [list(calls) for calls in turns]
    changed[turn][place] = ToolCall(call.name, arguments, "")
    return changed


def as_python(turns: Turns) -> list[list[str]]:
    def text(call: ToolCall) -> str:
        arguments = (call.arguments or {}).items()
        return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in arguments)})"

    return [[text(call) for call in turn] for turn in turns]


def trajectories(factory: BfclFactory) -> Sequence[tuple[str, Task, Turns]]:
    found = []
    for task in factory.tasks("test"):
        rng = random.Random(f"{factory.category}/{task.index}")
        turns = turns_of(factory, task)
        kinds = {
            "reference": turns,
            "nothing": [[] for _ in turns],
            "dropped": drop(turns, rng),
            "shuffled": shuffle(turns, rng),
            "corrupted": corrupt(turns, rng),
        }
        found += [(kind, task, changed) for kind, changed in kinds.items()]
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("category", list(FACTORIES))
def test_scores_are_the_official_checkers(category: str, tmp_path: Path) -> None:
    factory = FACTORIES[category]
    played = trajectories(factory)
    cases = [
        {"category": category, "index": task.index, "turns": as_python(turns)}
        for _, task, turns in played
    ]
    official = official_verdicts(cases, tmp_path)
    assert len(official) == len(played) == 1000
    long = TOO_LONG.get(category, ())
    differing, passed = [], Counter[str]()
    for (kind, task, turns), verdict in zip(played, official, strict=True):
        passed[kind] += verdict
        reward, _ = play(factory, task, turns, together=task.index in long)
        if (reward == 1.0) != verdict:
            differing.append((kind, task.index))
    assert differing == []
    assert (passed["reference"], passed["nothing"]) == (200, 0)
    assert 0 < passed["shuffled"] < 200
    assert max(passed["dropped"], passed["corrupted"]) < 200


def test_a_second_reset_counts_from_zero() -> None:
    env = MULTI_TURN_BASE.make(EnvironmentOptions())
    task = MULTI_TURN_BASE.tasks("test")[0]
    env.reset(task, 0)
    env.step(Action("", (ToolCall("no_such_tool", {}, ""),)))
    assert env.metrics()["calls"] == env.metrics()["tool_errors"] == 1.0
    env.reset(task, 0)
    assert env.metrics()["calls"] == env.metrics()["tool_errors"] == 0.0
