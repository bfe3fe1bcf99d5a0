"""`toolroll new-env`: what it writes passes its own test, mypy and check-env, and is short."""

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


def test_what_is_written_is_short_and_passes_its_checks(tmp_path: Path) -> None:
    done = toolroll("new-env", "heat-pump", "--at", tmp_path)
    assert done.exit_code == 0, done.output
    file, test = tmp_path / "heat_pump.py", "test_heat_pump.py"
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, test]
    lines = file.read_text().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "@" not in file.read_text()
    tested = run("-m", "pytest", "-q", "-p", "no:cacheprovider", test, at=tmp_path, path=file)
    assert "3 passed" in tested.stdout, tested.stdout + tested.stderr
    typed = run("-m", "mypy", "--strict", file.name, test, at=tmp_path, path=tmp_path)
    assert typed.returncode == 0, typed.stdout + typed.stderr
    checked = toolroll("check-env", f"{file}:env")
    assert checked.exit_code == 0, checked.output
    assert "references earn 1.0: 2 of 2" in checked.stdout
    with pytest.raises(UsageError, match=r"heat_pump.py already exists"):
        new_env("heat-pump", tmp_path)


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
