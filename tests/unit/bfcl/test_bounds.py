"""BFCL's tools: what a model may write neither runs away, nor runs as code, nor reaches another
episode."""

import decimal
from pathlib import Path
from typing import Any

import mpmath
import pytest
from support.memory import peak

from toolroll.environments.bfcl import MULTI_TURN_BASE
from toolroll.environments.bfcl.environment import BfclEnvironment
from toolroll.environments.bfcl.instances import BfclInstances
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import Action, EnvironmentOptions


def environment_with(name: str) -> tuple[BfclEnvironment, BfclInstances]:
    for task in MULTI_TURN_BASE.tasks("test"):
        env = MULTI_TURN_BASE.make(EnvironmentOptions())
        env.reset(task, 0)
        if name in env._state.instances:
            return env, env._state
    raise AssertionError(f"no entry uses {name}")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("power", {"base": 9, "exponent": 9**9}),
        ("power", {"base": 10**400, "exponent": 10**3}),
        ("square_root", {"number": 2, "precision": 3_000_000}),
        ("logarithm", {"value": 2.0, "base": 10.0, "precision": 3_000_000}),
        ("multiply", {"a": 10**6000, "b": 2}),
        ("sum_values", {"numbers": [10**6000, 1]}),
    ],
)
def test_bombs_are_answered_at_once(name: str, arguments: dict[str, Any]) -> None:
    _, instances = environment_with("MathAPI")
    assert instances.call(name, arguments).startswith("Error during execution")
    assert instances.call(name, {}, arguments.values()) == instances.call(name, arguments)
    assert peak(lambda: instances.call(name, arguments)) < 50_000, (
        "a number was computed before it was refused"
    )


def test_sane_numbers_are_computed_and_precision_stays() -> None:
    _, instances = environment_with("MathAPI")
    digits, precision = mpmath.mp.dps, decimal.getcontext().prec
    assert instances.call("power", {"base": 2, "exponent": 10}) == '{"result": 1024}'
    assert instances.call("power", {"exponent": 10}, [2]) == '{"result": 1024}'
    assert "missing 1 required positional argument" in instances.call("power", {"base": 2})
    instances.call("logarithm", {"value": 2.0, "base": 10.0, "precision": 77})
    instances.call("square_root", {"number": 2.0, "precision": 77})
    assert (mpmath.mp.dps, decimal.getcontext().prec) == (digits, precision)


def test_no_text_of_the_model_runs_as_code(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    env, instances = environment_with("GorillaFileSystem")
    code = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    for name in (code, "_load_scenario", "__init__", "echo(content=1) or ls"):
        assert "is not defined" in instances.call(name, {})
    env.step(Action("", (ToolCall("echo", {"content": code}, ""),)))
    assert not trace.exists()
    echoed = instances.call("echo", {"content": "use ls() here"})
    assert echoed == '{"terminal_output": "use ls() here"}'


def test_two_episodes_of_one_task_share_nothing() -> None:
    task = MULTI_TURN_BASE.tasks("test")[0]
    one, other = (MULTI_TURN_BASE.make(EnvironmentOptions()) for _ in range(2))
    one.reset(task, 0)
    other.reset(task, 0)
    name = next(iter(one._state.instances))
    before = str(other._state.state())
    if "GorillaFileSystem" in one._state.instances:
        one._state.call("mkdir", {"dir_name": "only_mine"})
    assert one._state.differences(other._state), name
    assert str(other._state.state()) == before
