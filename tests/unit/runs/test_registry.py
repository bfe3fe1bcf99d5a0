"""The registry: names of entry points, of files and of modules; what is wrong is said."""

from pathlib import Path
from typing import Any

import pytest

from toolroll import EnvironmentOptions, Task, UsageError
from toolroll.rollout.runs.registry import (
    agent_maker,
    choose_tasks,
    environment_names,
    find_environment,
    load_environment,
    user_maker,
)
from toolroll.rollout.runtime.targets import absolute_target

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


@pytest.mark.usefixtures("pond")
def test_own_and_a_third_partys_environments_are_found() -> None:
    names = environment_names()
    own = {"desk", "bfcl/multi_turn_base", "bfcl/multi_turn_long_context", "tau-bench/airline"}
    assert own | {"pond"} <= set(names)
    assert names == sorted(names)
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
        (None, "0-2", [0, 1, 2]),
        (None, "0-1,5,1", [0, 1, 5]),
        (None, " 4 , 2", [4, 2]),
        ("dev", None, "no split 'dev'; it has test, train, held-out"),
        (None, "33", "has tasks 0 to 32"),
        (None, "two", "'two' is neither a number nor a range"),
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


# --- environments that are named by file or module ------------------------------------------------


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


def test_tasks_may_depend_on_the_arguments_but_on_no_instance(file: Path) -> None:
    source = "\n    @staticmethod\n    def tasks(step=1):\n        return [{}] * step\n"
    late = "class Late(Counter):\n    def tasks(self):\n        return []\n"
    file.write_text(f"{ENV}class Own(Counter):{source}{late}")
    assert len(find_environment(f"{file}:Own", {"step": 3}).tasks("test")) == 3
    assert len(find_environment(f"{file}:Own", {"label": "m"}).tasks("test")) == 1
    with pytest.raises(UsageError, match="tasks must be a list, or a static or class method"):
        find_environment(f"{file}:Late").tasks("test")


def test_options_a_factory_and_a_function_that_makes_one(file: Path) -> None:
    options = EnvironmentOptions(user=lambda seed: 0)  # type: ignore[arg-type, return-value]
    env: Any = find_environment(f"{file}:WithOptions").make(options)
    assert env._options is options
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
            find_environment(name, {"level": 3})
    with pytest.raises(UsageError, match="policy must be full or brief, not 3"):
        find_environment("desk", {"policy": 3})
    factory = find_environment(f"{sums}:make", {"answer": "7"})
    assert (factory.name, factory.tasks("test")[0].data["answer"]) == ("sums:make", "7")


def test_a_module_is_found_and_executed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first: Any = find_environment(f"{file}:Counter")
    monkeypatch.chdir(file.parent)
    for name in ("bench:Counter", "bench.py:Counter"):
        second: Any = find_environment(name)
        assert second.name == "bench:Counter"
    assert first.kind is second.kind
    names = ("bench.py:NAME", "a.b:NAME", "desk")  # a file becomes absolute, and nothing else
    assert [*map(absolute_target, names)] == [f"{file}:NAME", *names[1:]]


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        ("bench.py:Counter", {"stap": 1}, "there is no argument 'stap'; did you mean 'step'?"),
        ("bench.py:Counter", {"step": "1"}, "'step' must be a valid integer, not \"1\""),
        ("bench.py:desks", {}, "--env-args of .*desks: the argument 'some' is missing"),
        ("bench.py:Conter", {}, "has no 'Conter'; did you mean 'Counter'?"),
        ("bench.py:xyz", {}, "has no 'xyz'; it has START, Counter, Bare"),
        ("bench.py:NUMBER", {}, "is not an environment: it is an object of type int"),
        ("bench.py:counter", {}, "not an environment: it makes an object of type Counter"),
        ("bench.py:Hinted", {}, "Hinted: an annotation cannot be resolved: name 'Nowhere' is not"),
        ("bench.py:Abstract", {}, "bench:Abstract cannot be played: Abstract has no step"),
        ("bench.py:broken", {}, "when it was called: .*bench.py, line 43: KeyError: 'missing'"),
        ("no/such.py:env", {}, "there is no file no/such.py"),
        ("no_such_package.sub:env", {}, "there is no module 'no_such_package'"),
        ("bench.py", {}, "name the object in the file: bench.py:NAME"),
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
