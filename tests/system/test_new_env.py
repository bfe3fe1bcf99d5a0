"""`toolroll new-env`: what it writes passes its own test, mypy and check-env, and is short."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.commands import toolroll
from support.processes import python

from toolroll.cli.new_env import new_env
from toolroll.rollout.errors import UsageError


def run(*command: str, at: Path, path: Path) -> CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return python(*command, cwd=at, env=env | {"PYTHONPATH": str(path)})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written file, with its test beside it."""
    at = tmp_path_factory.mktemp("file")
    done = toolroll("new-env", "heat-pump", "--at", at)
    assert done.exit_code == 0, done.output
    return at / "heat_pump.py"


def test_one_file_is_short_and_has_its_test_beside_it(file: Path) -> None:
    names = sorted(path.name for path in file.parent.iterdir())
    assert names == ["heat_pump.py", "test_heat_pump.py"]
    lines = file.read_text().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "@" not in file.read_text()


def test_one_file_passes_its_test_and_mypy(file: Path) -> None:
    test = "test_heat_pump.py"
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", test, at=file.parent, path=file)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    typed = run("-m", "mypy", "--strict", file.name, test, at=file.parent, path=file.parent)
    assert typed.returncode == 0, typed.stdout + typed.stderr


def test_what_is_written_passes_check_env(file: Path) -> None:
    done = toolroll("check-env", f"{file}:env")
    assert done.exit_code == 0, done.output
    assert "references earn 1.0: 2 of 2" in done.stdout


REFUSED = {
    "lowercase letters": ["Heat", "heat_pump", "../x", "heat--pump", ""],
    "an existing module": ["class", "json", "pytest"],
    "an environment named 'desk' already": ["desk"],
}


@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for words, names in REFUSED.items() for name in names]
)
def test_names_that_cannot_be_are_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        new_env(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(file: Path) -> None:
    with pytest.raises(UsageError, match=r"heat_pump.py already exists"):
        new_env("heat-pump", file.parent)
