"""Mistakes on the command line: one line that names the option, and exit 2."""

import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.results import episode
from typer.main import get_command
from typer.testing import CliRunner

from toolroll.cli.app import app
from toolroll.evaluation.run_config import RunConfig
from toolroll.rollout.runs.episode_file import FILE_NAME, to_line

RUN = ["run", "desk", "--model", "embedded"]
SERVE = ["serve", "--model", "embedded"]
ADDRESS = "--engine: the engine's address must begin with http://"
JINJA = "(bad.jinja) is not valid Jinja: line 2: "
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


FILES = {
    "afile": "",
    "bad.yaml": "samples: [1\nseed: 2\n",
    "bad.jinja": "{{ messages }}\n{% if tools %}\n",
    "text.yaml": "samples: three\n",
    "switch.yaml": "samples: true\n",
    "twice.yaml": "samples: 2\nsamples: 3\n",
    "unknown.yaml": "sample: 2\n",
    "list.yaml": "- 1\n",
    "other.yaml": "env: bfcl\n",
    "broken.py": BROKEN,
    "null.py": "x = 1\0",
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(here: Path) -> None:
    for name, text in FILES.items():
        (here / name).write_text(text)
    for name in ("run", "torn", "odd", "later"):
        Path(name).mkdir()
        Path(name, FILE_NAME).write_bytes(to_line(episode()))
    Path("torn", "summary.json").write_text('{"environments"')
    Path("later", "summary.json").write_text('{"schema_version": 2, "environments": {}}')
    Path("odd", "run.json").write_text('{"schema_version": 1, "environments": {"pond": [1]}}')


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*RUN, "--engine", "127.0.0.1:31007"], ADDRESS),
        ([*RUN, "--engine", "http://127.0.0.1:9/v1/"],
         "give the engine's own, without /v1: http://127.0.0.1:9\n"),
        # Before a tokenizer is loaded, which a hub may answer after a minute.
        ([*NO_MODEL, "--parser", "foo"], "--parser: "),
        ([*NO_MODEL, "--env-args", '{"polcy": 1}'], "desk takes only the setting policy"),
        ([*NO_MODEL, "--env-args", "line=3"], "--env-args is not JSON"),
        ([*NO_MODEL, "--sampling-params", '{"n": 2}'], "n must be 1, not 2"),
        ([*NO_MODEL, "--sampling-params", '{"min_new_tokens": "x"}'], "cannot be the text 'x'"),
        ([*NO_MODEL, "--sampling-params", '{"topp": 1}'], "did you mean 'top_p'?"),
        (["run", "harbor", *NO_MODEL[2:], "--env-args", '{"path": "nope"}'],
         "path (--env-args): there is no folder nope"),
        ([*RUN, "--chat-template-kwargs", "[1]"], "--chat-template-kwargs must be a JSON object"),
        ([*SERVE, "--history", "foo"], "--history: must be 'fork', 'scaffold' or 'preserve'"),
        ([*SERVE, "--verify", "x", "--port", "-1"],
         "--port: must be at least 0, not -1; --verify: must be 'off', "),
        ([*RUN, "--tasks", "0,5-2"], "--tasks '0,5-2': '5-2' is an empty range; did you mean 2-5?"),
        ([*RUN, "--chat-template", "bad.jinja"], JINJA),
        (["check-template", "embedded", "--chat-template", "bad.jinja"], JINJA[1:]),
        ([*RUN, "--chat-template", "{{ messages[0].content }"], "is not valid Jinja: line 1: "),
        (["run", "desk", "--model", "./nope"], "'./nope' (--model): there is no such folder"),
        (["run", "desk", "--model", "embeded"], "'embeded' (--model): did you mean 'embedded'?"),
        ([*RUN, "--config", "bad.yaml"], "--config bad.yaml cannot be read: "),
        ([*RUN, "--config", "none.yaml"], "--config none.yaml: there is no such file"),
        ([*RUN, "--config", "list.yaml"], "--config list.yaml must hold a mapping"),
        ([*RUN, "--config", "other.yaml"], "--config other.yaml: env is 'bfcl', but the command"),
        ([*RUN, "--config", "text.yaml"], "--config text.yaml: samples: must be a whole number"),
        ([*RUN, "--config", "switch.yaml"],
         "--config switch.yaml: samples: must be a number, not true"),
        ([*RUN, "--config", "twice.yaml"], "--config twice.yaml sets samples more than once"),
        ([*RUN, "--config", "unknown.yaml"],
         "--config unknown.yaml: there is no setting 'sample'; did you mean 'samples'?"),
        (["demo", "--out", "afile"], "--out afile is a file"),
        (["tasks", "desk", "--out", "."], "--out . is a folder"),
        (["run", "desk"], "toolroll: --model: must be given"),
        ([*RUN, "--samples", "0"], "--samples: must be at least 1, not 0"),
        ([*RUN, "--samples", "two"], "--samples: must be a whole number, not 'two'"),
        ([*RUN, "--sync", "sometimes"],
         "toolroll: --sync: must be 'always' or 'end', not 'sometimes'\n"),
        (["export", "run", "--format", "atif", "--out", "afile/x"],
         "cannot create afile/x: Not a directory"),
        (["view", "run", "--out", "nope/x"], "--out nope/x: there is no folder nope"),
        (["view", "run", "--out", "."], "--out . is a folder: the page is a file"),
        (["tasks", "desk", "--out", "/dev/null"], "/dev/null cannot be written: it is not a reg"),
        (["tasks", "desk", "--tasks", "²"], "'²' is neither a number nor a range such as 0-9"),
        (["tasks", "broken.py:Nothing"], "toolroll: broken:Nothing has no tasks in the split test"),
        (["run", "broken.py:Twice", *RUN[2:], "--engine", "http://127.0.0.1:9"],
         "toolroll: two tasks have the id 'a': give each task its own id"),
        (["tasks", ":env"], ":env: name the object in the file: FILE.py:NAME"),
        (["tasks", "null.py:env"], "null.py: SyntaxError: source code string cannot contain null"),
        ([*RUN, "--temperature", "nan"], "--temperature: must be a finite number"),
        (["export", "run", "--env", "lake", "--out", "x"], "--env 'lake': run has only pond"),
        (["view", "torn"], "torn/summary.json cannot be read ("),
        (["view", "later"], "later/summary.json has schema version 2; this toolroll reads 1\n"),
        (["view", "odd"], "odd/run.json cannot be read ("),
        (["engine", "--port", "65536"], "--port: must be at most 65535"),
        (["new-env", "no-folder", "--at", "afile"], "--at: afile/no_folder.py cannot be written: "),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments: list[str], words: str, command: Any) -> None:
    handler = signal.getsignal(signal.SIGINT)
    status, _, errors = command(*arguments)
    assert (status, errors.count("\n")) == (2, 1), errors
    assert words in errors
    assert signal.getsignal(signal.SIGINT) is handler


def shown_help(*arguments: str, columns: int = 80) -> str:
    variables = {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, [*arguments, "--help"], env=variables).output


def test_help_shows_all_settings_and_the_version_is_told() -> None:
    told = shown_help("run", columns=300)
    [samples] = [line for line in told.splitlines() if "│ --samples " in line]
    assert "Default: 1" in samples
    for name in RunConfig.model_fields:
        assert name == "env" or f" --{name.replace('_', '-')} " in told
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"toolroll {version('toolroll')}\n")


@pytest.mark.parametrize("name", sorted(get_command(app).commands))  # type: ignore[attr-defined]
def test_help_shows_whole_names_in_80_columns(name: str) -> None:
    told = shown_help(name)
    assert "--help" in told
    assert "…" not in told
