"""Mistakes on the command line: one line that names the option, and exit 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from toolroll.rollout.cli.app import main

RUN = ["run", "desk", "--model", "embedded"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("afile").write_text("")
    Path("bad.yaml").write_text("samples: [1\nseed: 2\n")
    Path("unknown.yaml").write_text("sample: 2\n")
    Path("list.yaml").write_text("- 1\n")


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line."""
    monkeypatch.setattr(sys, "argv", ["toolroll", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    told: Any = capsys.readouterr().err
    assert (ended.value.code, told.count("\n")) == (2, 1), told
    return str(told)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*RUN, "--engine", "127.0.0.1:31007"], "--engine: the engine's address must begin with http://"),
        (["serve", "--model", "embedded", "--engine", "127.0.0.1:31007"], "--engine: the engine's address must begin with http://"),
        ([*RUN, "--parser", "foo"], "--parser: "),
        (["serve", "--model", "embedded", "--parser", "foo"], "--parser: "),
        (["serve", "--model", "embedded", "--history", "foo"], "--history: "),
        ([*RUN, "--config", "bad.yaml"], "--config bad.yaml cannot be read: "),
        ([*RUN, "--config", "none.yaml"], "--config none.yaml: there is no such file"),
        ([*RUN, "--config", "list.yaml"], "--config list.yaml must hold a mapping"),
        ([*RUN, "--config", "unknown.yaml"], "--config unknown.yaml: there is no setting 'sample'; did you mean 'samples'?"),
        ([*RUN, "--endpoint", "http://127.0.0.1:9/v1", "--out", "afile"], "--out afile: there is a file of that name"),
        ([*RUN, "--endpoint", "http://127.0.0.1:9/v1", "--out", "afile/x"], "--out afile/x: the folder cannot be made"),
        (["demo", "--out", "afile"], "--out afile: there is a file of that name"),
        (["tasks", "desk", "--out", "."], "--out . is a folder"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(arguments, monkeypatch, capsys)
