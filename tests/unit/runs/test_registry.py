"""The registry: names come from entry points, a third party's included; what is wrong is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolroll.rollout.environment import Task
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.registry import (
    agent_maker,
    choose_tasks,
    environment_names,
    find_environment,
    load_environment,
    user_maker,
)

MODULE = """
from toolroll.environments.desk import DeskFactory

class Pond(DeskFactory):
    name = "pond"
    def missing(self):
        return "pip install pond"

POND = Pond()
"""


@pytest.fixture
def pond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package of somebody else's with two entry points: an instance and a class."""
    (tmp_path / "pond_bench.py").write_text(MODULE)
    info = tmp_path / "pond_bench-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pond-bench\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[toolroll.environments]\npond = pond_bench:POND\npond-class = pond_bench:Pond\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_own_environments_are_listed() -> None:
    names = environment_names()
    own = {"desk", "bfcl/multi_turn_base", "bfcl/multi_turn_long_context", "tau-bench/airline"}
    assert own <= set(names)
    assert names == sorted(names)


@pytest.mark.usefixtures("pond")
def test_a_third_partys_environment_is_found() -> None:
    assert "pond" in environment_names()
    assert find_environment("pond").name == "pond"
    assert find_environment("pond-class").name == "pond"
    words = "pond needs a package that is not installed: pip install pond"
    with pytest.raises(UsageError, match=words):
        load_environment("pond")


@pytest.mark.parametrize(
    ("find", "name", "words"),
    [
        (find_environment, "deks", "did you mean 'desk'"),
        (find_environment, "zzz", "toolroll envs lists all names"),
        (agent_maker, "nobody", r"no agent named 'nobody'; there are .*tool-calling"),
        (user_maker, "nobody", "no user simulator named 'nobody'"),
    ],
)
def test_unknown_names_are_refused(find: Any, name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find(name)


@pytest.mark.parametrize(
    ("split", "wanted", "chosen"),
    [
        (None, None, [*range(33)]),
        (None, "3", [3]),
        (None, "0-2", [0, 1, 2]),
        (None, "0-1,5,1", [0, 1, 5]),
        (None, " 4 , 2", [4, 2]),
        ("dev", None, "no split 'dev'; it has test, train, held-out"),
        (None, "33", "has tasks 0 to 32"),
        (None, "0-99", "has tasks 0 to 32"),
        (None, "two", "'two' is neither a number nor a range"),
        (None, "1-", "'1-' is neither a number nor a range"),
    ],
)
def test_tasks_are_chosen(split: str | None, wanted: str | None, chosen: list[int] | str) -> None:
    desk = find_environment("desk")
    if isinstance(chosen, str):
        with pytest.raises(UsageError, match=chosen):
            choose_tasks(desk, split, wanted)
    else:
        assert [task.index for task in choose_tasks(desk, split, wanted)] == chosen


def test_tasks_that_cannot_be_read_are_one_line() -> None:
    class Broken(type(find_environment("desk"))):  # type: ignore[misc]
        def tasks(self, split: str) -> list[Task]:
            return [Task(name=split)]  # type: ignore[call-arg]

    with pytest.raises(UsageError, match=r"desk: tasks\('test'\) failed: .*test_registry.py, line"):
        choose_tasks(Broken(), None, None)  # pyright: ignore[reportAbstractUsage]
