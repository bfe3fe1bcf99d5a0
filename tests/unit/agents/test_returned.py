"""Whatever an environment returns: its failure says what that was, and every line that is
written can be read back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import math
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.scripted_runs import Scripted, ScriptedFactory, play

from toolroll.agents.loop.environment_results import checked_step
from toolroll.rollout.errors import EnvironmentFailure, first_error
from toolroll.rollout.runs.episode_file import from_line, to_line
from toolroll.rollout.runs.runner import Runner, checked_result
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.runtime.jsonable import to_jsonable
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import (
    Action,
    Episode,
    InteractionResult,
    Observation,
    Status,
    StepResult,
    StopReason,
    Task,
)

USER = {"role": "user", "content": "Begin."}


async def played(name: str, returned: Any) -> Episode:
    """Return the episode of an environment whose method `name` returns `returned`."""

    def act(method: str, task: Task) -> Any:
        return returned if method == name else None

    [episode] = await play(ScriptedFactory(lambda: Scripted(act, blocking=False), count=1))
    return episode


def read_back(episode: Episode) -> Episode:
    """Return the episode as the file gives it back, after a look that it gives the same line
    again.
    """
    line = to_line(episode)
    again = from_line(line)
    assert to_line(again) == line
    Summary().add(again)
    return again


BAD_METRICS = {
    "nan": math.nan,
    "infinite": math.inf,
    "none": None,
    "text": "3.5",
    "huge": 10**400,
    "sum": 1e308,
    "list": [1],
    "complex": np.complex64(1 + 1j),
    "object": object(),
}


async def test_metrics_keep_their_finite_numbers_and_name_the_others() -> None:
    good = {
        "one": 1,
        "half": np.float32(0.5),
        "yes": True,
        "big": 2**60,
        "exact": Decimal("0.25"),
        7: 7,
    }
    episode = read_back(await played("metrics", good | BAD_METRICS | {"7": 8}))
    assert episode.result.reward == 1.0
    wanted = {"one": 1.0, "half": 0.5, "yes": 1.0, "big": 2.0**60, "exact": 0.25, "7": 7.0}
    wanted = {f"env/{name}": value for name, value in wanted.items()}
    assert {name: episode.result.metrics[name] for name in wanted} == wanted
    assert not {f"env/{name}" for name in BAD_METRICS} & episode.result.metrics.keys()
    message = episode.result.info["metrics_error"]["message"]
    assert all(f"{name}: " in message for name in BAD_METRICS)
    assert "text: '3.5'" in message and "7: 8" in message
    assert len(message) < 1000


async def test_an_environments_values_replace_none_of_the_loops_own() -> None:
    own = {"turns": 99.0, "invalid_calls": 7.0, "invalid_calls/invalid_json": 7.0, "reruns": 5.0}
    reported = {"tool_errors": 2.0, "tool_errors/look": 2.0, "user_calls": 3.0}
    info = {"bad_calls": 5, "error": "x", "trainable": False, "forks": 1, "reason": "ok"}

    def act(name: str, task: Task) -> Any:
        if name == "metrics":
            return own | reported
        return StepResult((), 1.0, True, info=info) if name == "step" else None

    [episode] = await play(ScriptedFactory(lambda: Scripted(act, blocking=False), count=1))
    result = read_back(episode).result
    assert {name: result.metrics[f"env/{name}"] for name in own} == own
    assert {name: result.metrics[name] for name in reported} == reported
    assert result.metrics["turns"] == 1.0 and "invalid_calls" not in result.metrics
    assert result.info["reason"] == "ok" and result.info["env/bad_calls"] == 5
    assert result.info["env/error"] == "x" and not {"error", "bad_calls"} & result.info.keys()


async def test_an_agents_error_of_another_shape_ends_no_run() -> None:
    class Agent:
        async def asolve(self, env: Any, *args: Any, **named: Any) -> Any:
            return InteractionResult(
                "", None, [], {"error": "no shape"}, stop_reason=StopReason.ENGINE_ERROR
            )

    factory = ScriptedFactory(lambda: Scripted(lambda name, task: None), count=4)
    with pytest.raises(ExceptionGroup) as group:
        await Runner(factory, Agent, RunSettings(give_up_after=2)).run(
            factory.tasks("test"), lambda episode: None
        )
    assert "2 attempts at episodes failed in a row" in str(first_error(group.value))


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("reason", StopReason)
def test_the_worse_of_an_agents_status_and_stop_reason_is_kept(
    status: Status, reason: StopReason
) -> None:
    solved = InteractionResult("", 1.0, [], {}, status=status, stop_reason=reason)
    again = read_back(Episode("pond", "t-0", 0, 0, 0, checked_result(solved))).result
    order = [Status.COMPLETED, Status.TRUNCATED, Status.ABORTED]
    assert again.status is max(status, reason.status, key=order.index)
    assert again.status is again.stop_reason.status
    assert (again.stop_reason is reason) is (reason.status is again.status)
    assert again.reward == (None if again.status is Status.ABORTED else 1.0)


@pytest.mark.parametrize("returned", [5, "numbers", [("a", 1)]])
async def test_metrics_must_be_a_mapping(returned: Any) -> None:
    episode = read_back(await played("metrics", returned))
    assert episode.result.reward == 1.0
    assert (
        "Scripted.metrics must return a mapping of numbers"
        in episode.result.info["metrics_error"]["message"]
    )


@pytest.mark.parametrize(
    ("name", "returned", "said"),
    [
        ("step", StepResult([USER], 10**400), "reward 1000"),
        ("step", StepResult([USER], 10**10_000), "reward"),
        ("step", StepResult([USER], math.nan), "reward nan"),
        ("step", StepResult([USER], "1.0"), "reward '1.0'"),  # type: ignore[arg-type]
        ("step", StepResult([USER], object()), "reward <object"),  # type: ignore[arg-type]
        ("step", StepResult([USER], info=None), "info must be a mapping, not None"),  # type: ignore[arg-type]
        ("step", StepResult([USER], tools=5), "tools must be a list of tools, not 5"),  # type: ignore[arg-type]
        ("step", StepResult([USER], done="no"), "done must be True or False, not 'no'"),  # type: ignore[arg-type]
        ("step", StepResult([USER], done=np.zeros(2)), "done must be True or False"),  # type: ignore[arg-type]
        ("step", StepResult([{"role": np.zeros(2)}]), "a mapping with a role of"),
        ("step", "done", "step must return a StepResult, not str"),
        ("reset", Observation([USER], tools=5), "tools must be a list of tools, not 5"),  # type: ignore[arg-type]
        ("reset", Observation([USER], tools=None), "tools must be a list of tools, not None"),  # type: ignore[arg-type]
        ("reset", Observation([USER], info=None), "info must be a mapping, not None"),  # type: ignore[arg-type]
        ("reset", 5, "reset must return an Observation, not int"),
    ],
)
async def test_a_failure_says_what_was_returned(name: str, returned: Any, said: str) -> None:
    result = read_back(await played(name, returned)).result
    assert (result.status, result.stop_reason) == (Status.ABORTED, StopReason.ENVIRONMENT_ERROR)
    assert f"Scripted.{name}" in result.info["error"]["message"]
    assert said in result.info["error"]["message"]
    assert len(result.info["error"]["message"]) < 500


@pytest.mark.parametrize(
    "reward", [np.float64(0.5), np.float16(0.5), np.array(0.5), Decimal("0.5"), 0.5]
)
async def test_any_number_is_a_reward(reward: Any) -> None:
    result = read_back(await played("step", StepResult((), reward, True))).result
    assert (result.reward, result.step_rewards, result.status) == (0.5, (0.5,), Status.COMPLETED)


async def test_a_sum_of_rewards_that_is_infinite_is_a_failure() -> None:
    class Rich(Scripted):
        reward_mode = "sum"

    def act(name: str, task: Task) -> Any:
        return StepResult([USER], 1.5e308) if name == "step" else None

    [episode] = await play(ScriptedFactory(lambda: Rich(act, blocking=False), count=1), max_turns=2)
    assert read_back(episode).result.stop_reason is StopReason.ENVIRONMENT_ERROR


class Hostile:
    """Every look at it fails."""

    def __repr__(self) -> str:
        raise ZeroDivisionError

    __str__ = __repr__


class Exiting:
    """A look at it would end the process."""

    def __repr__(self) -> str:
        raise SystemExit(0)


class BadMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise ZeroDivisionError

    def __iter__(self) -> Any:
        return iter(["role"])

    def __len__(self) -> int:
        return 1


class Color(Enum):
    RED = (1, 2)


@dataclasses.dataclass
class Note:
    text: Any


RING: list[Any] = []
RING += [RING, RING]

HARD = [Hostile(), Exiting(), BadMapping(), 10**10_000, {10**10_000: 1}, {"\udcff", Hostile()}]
"""Values that a test's own report cannot show."""
WEIRD = [
    RING,
    Note(RING),
    Note("\ud800"),
    Color.RED,
    {1: "a", "1": "b", None: "d", (1, 2): "e", 1.5: "f", b"x": "g"},
    datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(seconds=1))),
    datetime.time(1, tzinfo=datetime.UTC),
    UUID(int=7),
    {"\udcff", 1},
    np.array([object(), None]),
    np.arange(6).reshape(2, 3).T,
    np.longdouble("1e4000"),
    np.complex64(1j),
    np.datetime64("NaT"),
    np.array(["a", "\ud800"]),
    float("nan"),
    -math.inf,
    ValueError("x"),
    b"\xff",
    Decimal("NaN"),
    Ellipsis,
]
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=5)
    | st.binary(max_size=3)
    | st.sampled_from(WEIRD),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGE = st.builds(
    lambda content, more: {"role": "user", "content": content} | more, ANY, st.just({})
)
MESSAGES = ANY | st.lists(
    st.just(USER) | MESSAGE | st.builds(lambda extra: USER | {"extra": extra}, ANY), max_size=2
)
TOOLS = st.just(()) | ANY | st.builds(lambda p: [{"function": {"name": "f", "parameters": p}}], ANY)
INFO = st.dictionaries(st.text(max_size=3) | st.integers() | st.none(), ANY, max_size=3) | ANY
RETURNED = st.one_of(
    st.tuples(st.just("reset"), st.builds(Observation, MESSAGES, TOOLS, INFO) | ANY),
    st.tuples(
        st.just("step"),
        st.builds(StepResult, MESSAGES, ANY, st.booleans() | ANY, TOOLS, INFO) | ANY,
    ),
    st.tuples(
        st.just("step"),
        st.builds(StepResult, st.just(()), st.just(1.0), st.just(True), st.none(), INFO),
    ),
    st.tuples(
        st.just("metrics"),
        st.dictionaries(st.text(max_size=3) | st.integers(), ANY, max_size=4) | ANY,
    ),
    st.tuples(st.just("truncated_reward"), ANY),
)


@given(RETURNED)
@example(("step", StepResult((), 1.0, True, info={"weird": WEIRD})))
@settings(deadline=None)
def test_every_line_that_is_written_can_be_read_back(returned: tuple[str, Any]) -> None:
    episode = asyncio.run(played(*returned))
    again = read_back(episode).result
    assert again.stop_reason is not StopReason.INTERNAL_ERROR, again.info["error"]
    assert again.reward == episode.result.reward
    assert again.metrics == episode.result.metrics


@pytest.mark.parametrize("at", range(len(HARD)))
async def test_a_value_whose_repr_fails_costs_only_its_episode(
    at: int,
) -> None:
    value = HARD[at]
    for name, returned in (
        ("step", StepResult((), 1.0, True, info={"weird": [value]})),
        ("step", StepResult([USER | {"extra": value}], 1.0)),
        ("step", StepResult([value])),  # type: ignore[list-item]
        ("step", value),
        ("reset", Observation([USER], [value])),  # type: ignore[list-item]
        ("metrics", {"weird": value}),
        ("metrics", value),
    ):
        assert (
            read_back(await played(name, returned)).result.stop_reason
            is not StopReason.INTERNAL_ERROR
        )


@given(ANY)
@example(WEIRD)
def test_to_jsonable_never_raises(value: Any) -> None:
    line = orjson.dumps(to_jsonable(value), option=orjson.OPT_SERIALIZE_NUMPY)
    assert orjson.dumps(orjson.loads(line)) == line


def test_keys_that_become_equal_in_json_keep_all_values() -> None:
    found = to_jsonable({1: "a", "1": "b", 0: "c", "0": "d", None: "e"})
    assert sorted(found.values()) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("reward", [True, 1, np.int64(1), np.bool_(True), Decimal(1)])
def test_a_reward_is_a_float_from_where_it_arrives(reward: Any) -> None:
    step = checked_step("env.step", StepResult(reward=reward, done=True), Action(""))
    result = checked_result(InteractionResult("", reward, [], {}))
    assert [(value, type(value)) for value in (step.reward, result.reward)] == [(1.0, float)] * 2


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", 10**400, [1.0, 2.0], 1j])
def test_a_reward_that_is_no_finite_number_is_refused(reward: Any) -> None:
    with pytest.raises(EnvironmentFailure, match=r"env\.step gave the reward .* finite number"):
        checked_step("env.step", StepResult(reward=reward, done=True), Action(""))
    with pytest.raises(ValueError, match=r"asolve returned the reward .* finite number"):
        checked_result(InteractionResult("", reward, [], {}))


@pytest.mark.parametrize(
    "result",
    [
        None,
        InteractionResult("", math.nan, [], {}),
        InteractionResult("", 1.0, [], {}, metrics={"a": math.nan, "b": 2.0, "c": None}),  # type: ignore[dict-item]
    ],
)
async def test_what_an_agent_returns_can_be_read_back_too(result: Any) -> None:
    class Agent:
        async def asolve(self, env: Any, *args: Any, **named: Any) -> Any:
            return result

    factory = ScriptedFactory(lambda: Scripted(lambda name, task: None), count=1)
    episodes: list[Episode] = []
    await Runner(factory, Agent, RunSettings()).run(factory.tasks("test"), episodes.append)
    again = read_back(episodes[0]).result
    if result is not None and result.reward == 1.0:
        assert (again.reward, again.metrics["b"]) == (1.0, 2.0)
        assert "a: nan; c: None" in again.info["metrics_error"]["message"]
    else:
        assert again.stop_reason is StopReason.INTERNAL_ERROR
