"""Mistakes on the command line: one line that names the option, and exit 2."""

from __future__ import annotations

import re
import signal
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.results import episode
from typer.main import get_command
from typer.testing import CliRunner

from toolroll.cli.app import app, main
from toolroll.evaluation.report import report
from toolroll.evaluation.run_config import RunConfig
from toolroll.rollout.runs.episode_file import FILE_NAME, to_line
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.types import Status, StopReason

SHOWN = {
    "--model": "Required",
    "--engine": "Default: http://127.0.0.1:30000",
    "--samples": "Default: 1",
    "--concurrency": "Default: 64",
    "--parser": "Default: auto",
    "--max-turns": "Default: 30",
    "--verify": "Default: sample",
}
RUN = ["run", "desk", "--model", "embedded"]
NO_MODEL = ["run", "desk", "--model", "nobody/no-model"]
BROKEN = """
from toolroll import Environment

class Nothing(Environment):
    tasks = []
    def reset(self, task, seed): ...
    def step(self, action): ...

class Twice(Nothing):
    tasks = [{"id": "a"}, {"id": "a"}]
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("afile").write_text("")
    Path("bad.yaml").write_text("samples: [1\nseed: 2\n")
    Path("bad.jinja").write_text("{{ messages }}\n{% if tools %}\n")
    Path("unknown.yaml").write_text("sample: 2\n")
    Path("list.yaml").write_text("- 1\n")
    Path("other.yaml").write_text("env: bfcl\n")
    Path("broken.py").write_text(BROKEN)
    Path("null.py").write_text("x = 1\0")
    for name in ("run", "torn", "odd"):
        Path(name).mkdir()
        Path(name, FILE_NAME).write_bytes(to_line(episode()))
    Path("torn", "summary.json").write_text('{"environments"')
    Path("odd", "run.json").write_text('{"schema_version": 1, "environments": {"pond": [1]}}')


def refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
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
        (
            [*RUN, "--engine", "127.0.0.1:31007"],
            "--engine: the engine's address must begin with http://",
        ),
        (
            ["serve", "--model", "embedded", "--engine", "127.0.0.1:31007"],
            "--engine: the engine's address must begin with http://",
        ),
        (
            [*RUN, "--engine", "http://127.0.0.1:9/v1/"],
            "give the engine's own, without /v1: http://127.0.0.1:9\n",
        ),
        ([*RUN, "--parser", "foo"], "--parser: "),
        # Before a tokenizer is loaded, which a hub may answer after a minute.
        ([*NO_MODEL, "--parser", "foo"], "--parser: "),
        ([*NO_MODEL, "--env-args", '{"polcy": 1}'], "desk takes only the setting policy"),
        ([*NO_MODEL, "--sampling-params", '{"n": 2}'], "n must be 1, not 2"),
        ([*NO_MODEL, "--sampling-params", '{"min_new_tokens": "x"}'], "cannot be the text 'x'"),
        (
            [*NO_MODEL, "--sampling-params", '{"temperature": "0.5"}'],
            "temperature cannot be the text '0.5'",
        ),
        ([*NO_MODEL, "--sampling-params", '{"topp": 1}'], "did you mean 'top_p'?"),
        (
            ["run", "harbor", *NO_MODEL[2:], "--env-args", '{"path": "nope"}'],
            "path (--env-args): there is no folder nope",
        ),
        ([*RUN, "--chat-template-kwargs", "[1]"], "--chat-template-kwargs must be a JSON object"),
        (["serve", "--model", "embedded", "--parser", "foo"], "--parser: "),
        (
            ["serve", "--model", "embedded", "--history", "foo"],
            "--history: must be 'fork', 'scaffold' or 'preserve'",
        ),
        (
            ["serve", "--model", "embedded", "--verify", "x", "--port", "-1"],
            "--port: must be at least 0; --verify: must be 'off', ",
        ),
        ([*RUN, "--tasks", "0,5-2"], "--tasks '0,5-2': '5-2' is an empty range; did you mean 2-5?"),
        ([*RUN, "--chat-template", "bad.jinja"], "(bad.jinja) is not valid Jinja: line 2: "),
        (
            ["serve", "--model", "embedded", "--chat-template", "bad.jinja"],
            "(bad.jinja) is not valid Jinja: line 2: ",
        ),
        (
            ["check-template", "embedded", "--chat-template", "bad.jinja"],
            "bad.jinja) is not valid Jinja: line 2: ",
        ),
        ([*RUN, "--chat-template", "{{ messages[0].content }"], "is not valid Jinja: line 1: "),
        (["run", "desk", "--model", "./nope"], "'./nope' (--model): there is no such folder"),
        (["run", "desk", "--model", "embeded"], "'embeded' (--model): did you mean 'embedded'?"),
        (["serve", "--model", "/nope/nope"], "'/nope/nope' (--model): there is no such folder"),
        ([*RUN, "--config", "bad.yaml"], "--config bad.yaml cannot be read: "),
        ([*RUN, "--config", "none.yaml"], "--config none.yaml: there is no such file"),
        ([*RUN, "--config", "list.yaml"], "--config list.yaml must hold a mapping"),
        ([*RUN, "--config", "other.yaml"], "--config other.yaml: env is 'bfcl', but the command"),
        (
            [*RUN, "--config", "unknown.yaml"],
            "--config unknown.yaml: there is no setting 'sample'; did you mean 'samples'?",
        ),
        (["demo", "--out", "afile"], "--out afile is a file"),
        (["tasks", "desk", "--out", "."], "--out . is a folder"),
        (["run", "desk"], "toolroll: --model: must be given"),
        (["run", "deks", "--model", "embedded"], "did you mean 'desk'"),
        ([*RUN, "--engine", "http://127.0.0.1:9", "--engine-timeout", "0"], "127.0.0.1:9"),
        ([*RUN, "--samples", "0"], "--samples: must be at least 1"),
        (
            ["export", "run", "--format", "atif", "--out", "afile/x"],
            "cannot create afile/x: Not a directory",
        ),
        (["view", "run", "--out", "nope/x"], "--out nope/x: there is no folder nope"),
        (["view", "run", "--out", "."], "--out . is a folder: the page is a file"),
        (["view", "run", "--out", "/dev/null"], "/dev/null cannot be written: it is not a regular"),
        (["tasks", "desk", "--out", "/dev/null"], "/dev/null cannot be written: it is not a reg"),
        (["tasks", "desk", "--tasks", "²"], "'²' is neither a number nor a range such as 0-9"),
        (["tasks", "broken.py:Nothing"], "toolroll: broken:Nothing has no tasks in the split test"),
        (["tasks", "broken.py:Nothing", "--tasks", "0"], "broken:Nothing has no tasks in the spl"),
        (["check-env", "broken.py:Nothing"], "broken:Nothing has no tasks in the split test"),
        (
            ["run", "broken.py:Twice", "--model", "embedded", "--engine", "http://127.0.0.1:9"],
            "toolroll: two tasks have the id 'a': give each task its own id",
        ),
        (["tasks", ":env"], ":env: name the object in the file: FILE.py:NAME"),
        (["tasks", "null.py:env"], "null.py: SyntaxError: source code string cannot contain null"),
        ([*RUN, "--temperature", "nan"], "--temperature: must be a finite number"),
        ([*RUN, "--temperature", "inf"], "--temperature: must be a finite number"),
        (["export", "run", "--env", "lake", "--out", "x"], "--env 'lake': run has only pond"),
        (["view", "torn"], "torn/summary.json cannot be read ("),
        (["view", "odd"], "odd/run.json cannot be read ("),
        (["engine", "--port", "65536"], "--port: must be at most 65535"),
        (["engine", "--latency", "-1"], "--latency: must be at least 0"),
        (["engine", "--context-length", "0"], "--context-length: must be at least 1"),
        (["new-env", "no-folder", "--at", "afile"], "--at: afile/no_folder.py cannot be written: "),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert words in refused(arguments, monkeypatch, capsys)
    assert signal.getsignal(signal.SIGINT) is handler


def test_every_reason_of_an_aborted_episode_stands_in_the_warning() -> None:
    summary = Summary("pond")
    for number, reason in enumerate(
        found for found in StopReason if found.status is Status.ABORTED
    ):
        summary.add(episode(f"t-{number}", reason=reason))
    warning = next(line for line in report(summary)["warnings"] if "excluded from rewards" in line)
    assert "template_error 1" in warning
    assert warning.count(" 1") == summary.episodes


def test_help_shows_the_defaults_and_the_version_is_told() -> None:
    told = (
        CliRunner()
        .invoke(app, ["run", "--help"], env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"})
        .output
    )
    lines = {
        name: next(line for line in told.splitlines() if f"│ {name} " in line) for name in SHOWN
    }
    assert {name: words for name, words in SHOWN.items() if words not in lines[name]} == {}
    for name in RunConfig.model_fields:
        assert name == "env" or f" --{name.replace('_', '-')} " in told
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"toolroll {version('toolroll')}\n")


@pytest.mark.parametrize("name", sorted(get_command(app).commands))  # type: ignore[attr-defined]
def test_help_shows_whole_names_in_80_columns(name: str) -> None:
    variables = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    told = CliRunner().invoke(app, [name, "--help"], env=variables).output
    assert "--help" in told
    assert "…" not in told


def test_the_list_of_commands_breaks_no_line_early() -> None:
    variables = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    told = CliRunner().invoke(app, ["--help"], env=variables).output
    lines = [line.strip("│").rstrip() for line in told.partition("Commands")[2].splitlines()[1:-1]]
    start = re.match(r" [\w-]+ +", lines[0])
    assert start is not None
    for line, after in pairwise(lines):
        if not after[: start.end()].strip() and (word := after.split()[:1]):
            assert len(line) + 1 + len(word[0]) > 76, (line, after)


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--samples", "0"],
        ["view", "run", "--tokens", "-1"],
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_starts(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert arguments[-2] in done.output
