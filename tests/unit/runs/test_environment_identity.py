"""The identity of an environment: only an edit that can move a reward changes it (`test_edits`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.quiz import HARMLESS, MOVES, Edit, forget, put, replace, write

from toolroll.evaluation import environment_identity as environment_identity_module
from toolroll.evaluation.environment_identity import environment_identity
from toolroll.rollout.runs.registry import load_environment

ONLY_WHILE_IT_PLAYS = {
    "a plug-in",
    "the system prompt",
    "answers, read late",
    "a CSV file",
    "a CSV file that --env-args names",
    "a package's resource",
    "a file of a folder",
    "a file more in a folder",
    "a file that only a file names",
    "a file with a computed name",
    "a file of the folder above",
    "a file of the working directory",
    "a package's code, same version",
}


def identity(root: Path, edit: Edit | None = None) -> dict[str, str]:
    """The identity of the benchmark in a new folder, after an edit."""
    write(root)
    if edit is not None:
        edit(root)
    target = f"{root / 'bench' / 'quiz.py'}:make"
    factory = load_environment(target, {"table": "table.csv", "level": "easy"})
    return environment_identity(target, factory, factory.tasks("test"))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("known")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(root / "site")])
        yield identity(root)
    forget(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", [*MOVES, *HARMLESS])
def test_only_edits_of_rewards_change_it(name: str, known: dict[str, str], tmp_path: Path) -> None:
    changes = name in MOVES and name not in ONLY_WHILE_IT_PLAYS
    assert (identity(tmp_path, (MOVES | HARMLESS)[name]) != known) is changes


@pytest.mark.usefixtures("known")
def test_of_large_data_the_size_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_identity_module, "_MOST_READ", 0)
    edits = [
        None,
        put("bench/limits.yaml", "weight: 2\n"),
        put("bench/limits.yaml", "weight: 20\n"),
        replace("bench/scoring.py", "1.0", "0.5"),
    ]
    first, same, longer, code = (
        identity(tmp_path / str(number), edit)["code"] for number, edit in enumerate(edits)
    )
    assert first == same
    assert len({first, longer, code}) == 3


def test_packages_count_by_version_and_file(
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
