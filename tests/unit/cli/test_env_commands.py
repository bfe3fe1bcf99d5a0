"""The commands that take an environment from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from toolroll.rollout.cli.app import app

RUN = CliRunner()


def test_the_tasks_of_a_file_name_it_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer reads them in another folder."""
    (tmp_path / "mine.py").write_text("from toolroll.agents.environments.desk import DESK\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = RUN.invoke(app, ["tasks", "mine.py:DESK", "--tasks", "0"], catch_exceptions=False)
    assert json.loads(done.stdout)["metadata"]["env"] == f"{tmp_path}/mine.py:DESK"


def test_new_env_says_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = RUN.invoke(app, ["new-env", "tide-gauge"], catch_exceptions=False)
    assert done.exit_code == 0
    test = "pip install pytest && python -m pytest test_tide_gauge.py"
    for line in ("toolroll check-env tide_gauge.py:env", test):
        assert f"  {line}\n" in done.stdout
    assert "  toolroll run tide_gauge.py:env --engine" in done.stdout
