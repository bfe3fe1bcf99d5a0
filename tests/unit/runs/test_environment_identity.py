"""The identity of an environment: every edit that can move a reward changes it, and no other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from toolroll.evaluation import environment_identity as environment_identity_module
from toolroll.evaluation.environment_identity import environment_identity
from toolroll.rollout.runs.registry import load_environment

ENV = '''
"""A pond."""
import json
from pathlib import Path

from helper import bonus  # the grader's
from toolroll import tool_environment

HERE = Path(__file__).parent
SYSTEM = (HERE / "policy.md").read_text()
TASKS = json.loads((HERE / "data" / "tasks.json").read_text())


def count(what: str) -> int:
    """Count the animals.

    Args:
        what: Which ones.
    """
    return 3


def reward(task: dict, final: str) -> float:
    from late import scale
    return scale(float(task["answer"] in final)) + bonus()


pond = tool_environment(tools=[count], tasks=TASKS, reward=reward, system=SYSTEM)
'''
FILES = {
    "env.py": ENV,
    "helper.py": "def bonus():\n    return 0.0\n",
    "late.py": "def scale(reward):\n    return reward\n",
    "unused.py": "X = 1\n",
    "policy.md": "Be brief.\n",
    "data/tasks.json": json.dumps([{"prompt": "How many ducks?", "answer": "3"}]),
    "notes.txt": "",
}
REORDERED = '"answer": "3", "prompt": "How many ducks?"'


def identity(folder: Path, edit: tuple[str, str, str] | None = None) -> dict[str, str]:
    """The identity of the environment in a new `folder`, after one text in a file is replaced."""
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if edit is not None:
        file, old, new = folder / edit[0], *edit[1:]
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    target = f"{folder / 'env.py'}:pond"
    factory = load_environment(target)
    return environment_identity(target, factory, factory.tasks("test"))


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.syspath_prepend(str(tmp_path / "known"))
    for name in ("helper", "late"):  # each test has its own
        monkeypatch.delitem(sys.modules, name, raising=False)
    return identity(tmp_path / "known")


MOVES = [
    ("env.py", 'scale(float(task["answer"] in final)) + bonus()', "1.0"),
    ("env.py", "count", "tally"),
    ("env.py", "tools=[count]", "tools=[]"),
    ("env.py", "Count the animals.", "Count the ducks."),
    ("env.py", "Which ones.", "Which animals."),
    ("env.py", "what: str", "what: int"),
    ("env.py", "return 3", "return 4"),
    ("env.py", "system=SYSTEM", 'system=SYSTEM + "!"'),
    ("helper.py", "0.0", "0.5"),
    ("late.py", "return reward", "return 2 * reward"),
    ("policy.md", "brief", "polite"),
    ("data/tasks.json", "ducks", "geese"),
    ("data/tasks.json", '"3"', '"4"'),
]
HARMLESS = [
    ("env.py", "# the grader's", "# another comment"),
    ("env.py", "    return 3\n", "\n    return (3)  # ducks\n"),
    ("env.py", 'float(task["answer"] in final)', "float(task['answer'] in final)"),
    ("unused.py", "1", "2"),
    ("notes.txt", "", "read me"),
    ("data/tasks.json", '"prompt": "How many ducks?", "answer": "3"', REORDERED),
]


@pytest.mark.parametrize("edit", [*MOVES, *HARMLESS])
def test_only_an_edit_that_can_move_a_reward_changes_it(
    edit: tuple[str, str, str], known: dict[str, str], tmp_path: Path
) -> None:
    assert (identity(tmp_path / "edited", edit) != known) is (edit in MOVES)


def test_of_very_large_data_only_the_size_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_identity_module, "_MOST_READ", 0)
    monkeypatch.syspath_prepend(str(tmp_path / "0"))
    edits = [
        None,
        ("policy.md", "brief", "quick"),
        ("policy.md", "brief", "polite"),
        ("late.py", "return reward", "return 0.0000"),
    ]
    first, same, longer, code = (
        identity(tmp_path / str(at), edit)["code"] for at, edit in enumerate(edits)
    )
    assert first == same
    assert len({first, longer, code}) == 3


def test_packages_count_by_their_version_and_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = load_environment("desk")
    monkeypatch.setattr(type(factory), "packages", ("pond-data",), raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for version, text in (("1", "a"), ("1", "b"), ("2", "b")):
        for name, content in (
            ("pond_data/__init__.py", ""),
            ("pond_data/tasks.txt", text),
            ("pond_data-1.dist-info/METADATA", f"Name: pond-data\nVersion: {version}\n"),
            ("pond_data-1.dist-info/RECORD", "pond_data/__init__.py,,\npond_data/tasks.txt,,\n"),
        ):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        found.append(environment_identity("desk", factory, [])["pond-data"])
    assert len(set(found)) == 3
    assert [version for version, _ in map(str.split, found)] == ["1", "1", "2"]
