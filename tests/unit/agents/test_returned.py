"""What an environment returns: a failure says what that was, and each line can be read back."""

import dataclasses
import datetime
import itertools
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import numpy as np
import orjson
import pytest
from support.scripted_runs import Scripted, ScriptedFactory, play

from toolroll import Action, Episode, InteractionResult, Observation, Status, StepResult, StopReason
from toolroll.agents.loop.environment_results import checked_step
from toolroll.rollout.errors import EnvironmentFailure
from toolroll.rollout.runs.episode_file import from_line, to_line
from toolroll.rollout.runs.runner import Runner, RunStoppedError, checked_result
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.runtime.jsonable import to_jsonable
from toolroll.rollout.settings import RunSettings


class Endless(Sequence[Any]):
    """A sequence whose end is never reached."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return {"role": "user", "content": "More."}


class EndlessMapping(dict[str, Any]):
    def items(self) -> Any:
        return ((f"key {number}", number) for number in itertools.count())


USER = {"role": "user", "content": "Begin."}


async def played(env: type[Scripted] = Scripted, max_turns: int = 30, **returned: Any) -> Episode:
    """Return an episode of an environment whose methods return `returned`."""
    act = lambda method, task: returned.get(method)
    factory = ScriptedFactory(lambda: env(act, blocking=False), count=1)
    [episode] = await play(factory, max_turns=max_turns)
    return episode


def read_back(episode: Episode) -> InteractionResult:
    """Return the result as the file gives it back, which gives the same line again."""
    line = to_line(episode)
    again = from_line(line)
    assert to_line(again) == line
    Summary().add(again)
    return again.result


GOOD_METRICS = {
    "one": (1, 1.0),
    "half": (np.float32(0.5), 0.5),
    "yes": (True, 1.0),
    "big": (2**60, 2.0**60),
    "exact": (Decimal("0.25"), 0.25),
    7: (7, 7.0),
}
BAD_METRICS = {
    "nan": math.nan,
    "none": None,
    "text": "3.5",
    "huge": 10**400,
    "sum": 1e308,
    "object": object(),
}


async def test_metrics_keep_their_finite_numbers_and_name_the_others() -> None:
    good = {name: value for name, (value, _) in GOOD_METRICS.items()}
    result = read_back(await played(metrics=good | BAD_METRICS | {"7": 8}))
    assert result.reward == 1.0
    expected = {f"env/{name}": number for name, (_, number) in GOOD_METRICS.items()}
    assert {name: result.metrics[name] for name in expected} == expected
    assert not {f"env/{name}" for name in BAD_METRICS} & result.metrics.keys()
    message = result.info["metrics_error"]["message"]
    assert all(f"{name}: " in message for name in BAD_METRICS)
    assert "text: '3.5'" in message and "7: 8" in message
    assert len(message) < 1000


@pytest.mark.parametrize("metrics", [5, "numbers", [("a", 1)], EndlessMapping()], ids=type)
async def test_metrics_that_are_no_mapping_are_left_out(metrics: Any) -> None:
    result = read_back(await played(metrics=metrics))
    assert result.reward == 1.0
    mapping = "Scripted.metrics must return a mapping of numbers"
    words = ENDLESS if isinstance(metrics, dict) else mapping
    assert words in result.info["metrics_error"]["message"]


async def test_an_environments_values_replace_none_of_the_loops_own() -> None:
    own = {"turns": 99.0, "invalid_calls": 7.0, "invalid_calls/invalid_json": 7.0, "reruns": 5.0}
    reported = {"tool_errors": 2.0, "tool_errors/look": 2.0, "user_calls": 3.0}
    info = {"bad_calls": 5, "error": "x", "trainable": False, "forks": 1, "reason": "ok"}
    step = StepResult((), 1.0, True, info=info)
    result = read_back(await played(metrics=own | reported, step=step))
    kept = reported | {f"env/{name}": value for name, value in own.items()} | {"turns": 1.0}
    assert {name: result.metrics[name] for name in kept} == kept
    assert "invalid_calls" not in result.metrics
    assert result.info["reason"] == "ok" and result.info["env/bad_calls"] == 5
    assert result.info["env/error"] == "x" and not {"error", "bad_calls"} & result.info.keys()


@pytest.mark.parametrize(
    ("reward", "number"),
    [(True, 1.0), (np.bool_(True), 1.0), (np.array(0.5), 0.5), (Decimal("0.5"), 0.5)],
)
async def test_any_number_is_a_reward(reward: Any, number: float) -> None:
    """It is a float from where it arrives."""
    result = read_back(await played(step=StepResult((), reward, True)))
    assert (result.reward, result.status) == (number, Status.COMPLETED)
    assert result.step_rewards == (number,)
    step = checked_step("env.step", StepResult(reward=reward, done=True), Action(""))
    solved = checked_result(InteractionResult("", reward, [], {}))
    assert [(end.reward, type(end.reward)) for end in (step, solved)] == [(number, float)] * 2


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", 10**400, [1.0, 2.0], 1j])
def test_a_reward_that_is_no_finite_number_is_refused(reward: Any) -> None:
    with pytest.raises(EnvironmentFailure, match=r"env\.step gave the reward .* finite number"):
        checked_step("env.step", StepResult(reward=reward, done=True), Action(""))
    with pytest.raises(ValueError, match=r"asolve returned the reward .* finite number"):
        checked_result(InteractionResult("", reward, [], {}))


async def test_a_sum_of_rewards_that_is_infinite_is_a_failure() -> None:
    class Rich(Scripted):
        reward_mode = "sum"

    episode = await played(Rich, max_turns=2, step=StepResult([USER], 1.5e308))
    assert read_back(episode).stop_reason is StopReason.ENVIRONMENT_ERROR


def step(*messages: Any, **fields: Any) -> tuple[str, StepResult]:
    return "step", StepResult(messages or [USER], **fields)


def reset(messages: Any = (USER,), **fields: Any) -> tuple[str, Observation]:
    return "reset", Observation(messages, **fields)


ENDLESS = "is a sequence endless?"


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (step(reward=object()), "reward <object"),
        (step(info=None), "info must be a mapping, not None"),
        (step(tools=5), "tools must be a list of tools, not 5"),
        (step(done="no"), "done must be True or False, not 'no'"),
        (step(done=np.zeros(2)), "done must be True or False"),
        (step({"role": np.zeros(2)}), "a mapping with a role of"),
        (("step", "done"), "step must return a StepResult, not str"),
        (reset(tools=None), "tools must be a list of tools, not None"),
        (reset(tools=[{"name": "add"}]), 'tools[0] must be {"type": "function"'),
        (reset([{"role": "user", "content": 3}]), "content of messages[0] must be text, not int"),
        (reset("hello"), "messages must be a list"),
        (("reset", 5), "reset must return an Observation, not int"),
        (reset(Endless()), ENDLESS),
        (reset(tools=Endless()), ENDLESS),
        (step(EndlessMapping(role="user", content="More.")), ENDLESS),
        (step(reward=1.0, done=True, info=EndlessMapping()), ENDLESS),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
async def test_a_failure_says_what_was_returned(returned: tuple[str, Any], words: str) -> None:
    result = read_back(await played(**dict([returned])))
    assert (result.status, result.stop_reason) == (Status.ABORTED, StopReason.ENVIRONMENT_ERROR)
    message = result.info["error"]["message"]
    assert f"Scripted.{returned[0]}" in message and words in message
    assert len(message) < 500


def returning(result: Any) -> Any:
    """Agents that return `result`."""

    class Agent:
        async def asolve(self, env: Any, *args: Any, **named: Any) -> Any:
            return result

    return Agent


async def test_an_agents_error_of_another_shape_ends_no_run() -> None:
    failed = InteractionResult(
        "", None, [], {"error": "no shape"}, stop_reason=StopReason.ENGINE_ERROR
    )
    factory = ScriptedFactory(lambda: Scripted(lambda name, task: None), count=4)
    runner = Runner(factory, returning(failed), RunSettings(give_up_after=2))
    with pytest.raises(RunStoppedError, match="2 attempts at episodes failed in a row"):
        await runner.run(factory.tasks("test"), lambda episode: None)


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("reason", StopReason)
def test_the_worse_of_status_and_stop_reason_is_kept(status: Status, reason: StopReason) -> None:
    solved = InteractionResult("", 1.0, [], {}, status=status, stop_reason=reason)
    again = read_back(Episode("pond", "t-0", 0, 0, 0, checked_result(solved)))
    order = [Status.COMPLETED, Status.TRUNCATED, Status.ABORTED]
    assert again.status is max(status, reason.status, key=order.index)
    assert again.status is again.stop_reason.status
    assert (again.stop_reason is reason) is (reason.status is again.status)
    assert again.reward == (None if again.status is Status.ABORTED else 1.0)


async def test_a_result_of_an_agent_is_made_one_that_can_be_written() -> None:
    metrics: Any = {"a": math.nan, "b": 2.0, "c": None}
    solved = checked_result(InteractionResult("", 1.0, [], {}, metrics=metrics))
    assert solved.metrics == {"b": 2.0}
    assert "a: nan; c: None" in solved.info["metrics_error"]["message"]
    factory, episodes = ScriptedFactory(lambda: Scripted(lambda name, task: None)), list[Episode]()
    runner = Runner(factory, returning(None), RunSettings())
    await runner.run(factory.tasks("test")[:1], episodes.append)
    assert read_back(episodes[0]).stop_reason is StopReason.INTERNAL_ERROR
    assert "must return an InteractionResult" in episodes[0].result.info["error"]["message"]


# --- any value ------------------------------------------------------------------------------------


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
VALUES = [*HARD, *WEIRD, WEIRD]


@pytest.mark.parametrize("number", range(len(VALUES)))
async def test_no_value_costs_more_than_its_episode(number: int) -> None:
    """Whatever it is and wherever it stands, the line that is written can be read back."""
    value = VALUES[number]
    for name, returned in (
        step(reward=1.0, done=True, info={"weird": [value]}),
        step(USER | {"extra": value}, reward=1.0),
        step(value),
        ("step", value),
        reset(tools=[value]),
        ("metrics", {"weird": value}),
        ("metrics", value),
    ):
        episode = await played(env=Scripted, max_turns=30, **{name: returned})
        again = read_back(episode)
        assert again.stop_reason is not StopReason.INTERNAL_ERROR, again.info["error"]
        assert again.reward == episode.result.reward
        assert again.metrics == episode.result.metrics


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_to_jsonable_never_raises(number: int) -> None:
    line = orjson.dumps(to_jsonable(VALUES[number]), option=orjson.OPT_SERIALIZE_NUMPY)
    assert orjson.dumps(orjson.loads(line)) == line


def test_keys_that_are_equal_in_json_keep_all_values() -> None:
    equal_in_json = to_jsonable({1: "a", "1": "b", 0: "c", "0": "d", None: "e"})
    assert sorted(equal_in_json.values()) == ["a", "b", "c", "d", "e"]
