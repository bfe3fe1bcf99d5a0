"""`toolroll new-env`: what it writes passes its own test and mypy, is listed, and is short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import PATIENCE
from typer.testing import CliRunner

from toolroll.rollout.cli.app import app
from toolroll.rollout.cli.new_env import new_env
from toolroll.rollout.errors import UsageError


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written package."""
    at = tmp_path_factory.mktemp("new")
    done = CliRunner().invoke(
        app, ["new-env", "heat-pump", "--at", str(at)], env={"COLUMNS": "300"}
    )
    assert done.exit_code == 0, done.output
    assert "then toolroll envs lists heat-pump" in done.stdout
    return at / "heat-pump"


def run(*command: str, at: Path, path: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {
        "PYTHONPATH": str(path)
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=at,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_its_files(package: Path) -> None:
    files = sorted(str(file.relative_to(package)) for file in package.rglob("*") if file.is_file())
    assert files == [
        "pyproject.toml",
        "src/heat_pump/__init__.py",
        "src/heat_pump/py.typed",
        "tests/test_heat_pump.py",
    ]
    text = "".join((package / name).read_text() for name in files)
    assert "@" not in text.replace("@pytest", "")
    assert len((package / files[1]).read_text().splitlines()) < 100


def test_installed_it_passes_its_own_test_and_is_listed(package: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(package),
    ]
    installed = run(*pip, at=tmp_path, path=tmp_path)
    assert installed.returncode == 0, installed.stderr
    tests = run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(package / "tests"),
        at=tmp_path,
        path=target,
    )
    assert "5 passed" in tests.stdout, tests.stdout + tests.stderr
    listed = run(
        "-c", "from toolroll.rollout.cli import main; main()", "envs", at=tmp_path, path=target
    )
    assert "heat-pump" in listed.stdout


def test_it_passes_mypy(package: Path) -> None:
    done = run("-m", "mypy", "--strict", "src", "tests", at=package, path=package / "src")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Heat", "small letters"),
        ("heat_pump", "small letters"),
        ("../x", "small letters"),
        ("heat--pump", "small letters"),
        ("", "small letters"),
        ("class", "something else in Python"),
        ("json", "something else in Python"),
        ("pytest", "something else in Python"),
        ("desk", "an environment named 'desk' already"),
    ],
)
def test_names_that_cannot_be_are_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        new_env(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(package: Path) -> None:
    with pytest.raises(UsageError, match="is there already"):
        new_env("heat-pump", package.parent)
