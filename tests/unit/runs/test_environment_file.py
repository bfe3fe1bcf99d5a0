"""Environments that are named by file or module, and what is said if that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolroll.rollout.environment import EnvironmentOptions, Task
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.registry import find_environment, load_environment
from toolroll.rollout.runtime.targets import absolute_target

ENV = '''
from neighbor_of_env import START
from toolroll import Action, Environment, EnvironmentOptions, Observation, StepResult, Task
from toolroll.environments.desk import Desk, DeskFactory

class Counter(Environment):
    """Count to a number."""
    tasks = [{"id": "near", "to": 3}, {"to": 9}]

    def __init__(self, step: int = 1, label: str = "n"):
        self.by, self.label = step, label

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": str(START)}])

    def step(self, action: Action) -> StepResult:
        return StepResult(done=True, reward=1.0)

    @staticmethod
    def reference(task):
        return [Action(str(task.data["to"]))]

class Bare(Counter):
    tasks = None

class WithOptions(Desk):
    tasks = DeskFactory().tasks("test")[:2]

def desks(some: int):
    factory = DeskFactory()
    factory.description = f"{some} desks"
    return factory

class Hinted(Counter):
    def __init__(self, some: "Nowhere"):
        pass

class Abstract(Environment):
    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([])

def broken():
    return {}["missing"]

def counter():
    return Counter()

DESK = DeskFactory()
NUMBER = 3
'''
SHORT = """
from toolroll import tool_environment

def make(answer: str):
    task = {"prompt": "?", "answer": answer}
    return tool_environment(tools=[], tasks=[task], reward=lambda task: 1.0)

env = make("42")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with environments of each kind, which imports its neighbor."""
    monkeypatch.syspath_prepend(str(tmp_path))  # so that sys.path is what it was afterwards
    (tmp_path / "neighbor_of_env.py").write_text("START = 0\n")
    (tmp_path / "bench.py").write_text(ENV)
    return tmp_path / "bench.py"


def test_a_class_is_an_environment_with_its_tasks(file: Path) -> None:
    factory = load_environment(f"{file}:Counter", {"step": 2})
    assert (factory.name, factory.description) == ("bench:Counter", "Count to a number.")
    tasks = factory.tasks("test")
    facts = [(task.id, task.index, task.data["to"]) for task in tasks]
    assert facts == [("near", 0, 3), ("1", 1, 9)]
    env: Any = factory.make(EnvironmentOptions(settings={"label": "m"}))
    assert (env.by, env.label) == (2, "m")
    assert [action.content for action in factory.reference(tasks[0]) or ()] == ["3"]
    bare = find_environment(f"{file}:Bare")
    assert list(bare.tasks("test")) == [Task("0", 0, "test")]  # without tasks, there is one


def test_tasks_may_depend_on_the_arguments(file: Path) -> None:
    source = "\n    @staticmethod\n    def tasks(step=1):\n        return [{}] * step\n"
    file.write_text(f"{ENV}class Own(Counter):{source}")
    assert len(find_environment(f"{file}:Own", {"step": 3}).tasks("test")) == 3
    assert len(find_environment(f"{file}:Own", {"label": "m"}).tasks("test")) == 1


def test_tasks_that_need_an_instance_are_refused(file: Path) -> None:
    file.write_text(ENV + "class Own(Counter):\n    def tasks(self):\n        return []\n")
    factory = find_environment(f"{file}:Own")
    with pytest.raises(UsageError, match="tasks must be a list, or a static or class method"):
        factory.tasks("test")


def test_a_constructor_that_takes_options_gets_them(file: Path) -> None:
    options = EnvironmentOptions(user=lambda seed: 0)  # type: ignore[arg-type, return-value]
    env: Any = find_environment(f"{file}:WithOptions").make(options)
    assert env._options is options


def test_a_factory_and_a_function_that_makes_one(file: Path) -> None:
    assert find_environment(f"{file}:DESK").name == "desk"
    assert find_environment(f"{file}:DeskFactory").name == "desk"
    assert find_environment(f"{file}:desks", {"some": 4}).description == "4 desks"


def test_a_factory_gets_the_arguments_as_settings(file: Path) -> None:
    sums = file.parent / "sums.py"
    sums.write_text(SHORT)
    for name, words in (
        ("desk", "desk takes only the setting policy, but got: level"),
        (f"{sums}:env", r"sums:env takes no settings, but got: level\. To support settings"),
    ):
        with pytest.raises(UsageError, match=words):
            find_environment(name, {"level": 3}).make(EnvironmentOptions())
    factory = find_environment(f"{sums}:make", {"answer": "7"})
    assert (factory.name, factory.tasks("test")[0].data["answer"]) == ("sums:make", "7")


def test_a_module_is_found_and_executed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first: Any = find_environment(f"{file}:Counter")
    monkeypatch.chdir(file.parent)
    for name in ("bench:Counter", "bench.py:Counter"):
        assert find_environment(name).name == "bench:Counter"
    second: Any = find_environment("bench.py:Counter")
    assert first.kind is second.kind


def test_a_file_becomes_absolute_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    absolute = [absolute_target(name) for name in ("a/b.py:NAME", "a.b:NAME", "desk")]
    assert absolute == ["/a/b.py:NAME", "a.b:NAME", "desk"]


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        ("bench.py:Counter", {"stap": 1}, "there is no argument 'stap'; did you mean 'step'?"),
        ("bench.py:Counter", {"step": "1"}, "'step' must be a valid integer, not \"1\""),
        ("bench.py:desks", {}, "--env-args of .*desks: the argument 'some' is missing"),
        ("bench.py:Conter", {}, "has no 'Conter'; did you mean 'Counter'?"),
        ("bench.py:xyz", {}, "has no 'xyz'; it has START, Action"),
        ("bench.py:NUMBER", {}, "is not an environment: it is an object of type int"),
        ("bench.py:counter", {}, "not an environment: it makes an object of type Counter"),
        ("bench.py:Hinted", {}, "Hinted: an annotation cannot be resolved: name 'Nowhere' is not"),
        ("bench.py:Abstract", {}, "bench:Abstract cannot be played: Abstract has no step"),
        ("bench.py:broken", {}, "when it was called: .*bench.py, line 43: KeyError: 'missing'"),
        ("no/such.py:env", {}, "there is no file no/such.py"),
        ("no_such_package.sub:env", {}, "there is no module 'no_such_package'"),
        ("bench.py", {}, "name the object in the file: bench.py:NAME"),
        ("bench.py:", {}, "name the object in the file: bench.py:NAME"),
    ],
)
@pytest.mark.usefixtures("file", "here")
def test_a_fault_is_one_line(target: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        find_environment(target, arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\ny = 1 / 0\n", "bad.py, line 2: ZeroDivisionError: division by zero"),
        ("x = 1\n\ndef f(:\n", "bad.py, line 3: SyntaxError"),
        ("import nothing_of_the_kind\n", "bad.py, line 1: ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)\n", "bad.py, line 1: SystemExit: 3"),
        ("import json\n\njson.loads('{')\n", "bad.py, line 3: JSONDecodeError"),
    ],
)
def test_an_error_of_the_file_names_its_line(file: Path, text: str, words: str) -> None:
    bad = file.parent / "bad.py"
    bad.write_text(text)
    for target in (f"{bad}:env", "bad:env"):
        with pytest.raises(UsageError, match=words):
            find_environment(target)
