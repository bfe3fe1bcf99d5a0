"""`toolroll run`: from the command line to the table, the files, a resumed run, and a run that
is stopped.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.status import Status
from support.commands import run_command, toolroll
from typer.testing import Result

from toolroll.cli.app import main
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.registry import find_environment
from toolroll.testing import (
    EmbeddedEngine,
    PolicyRequest,
    load_embedded_tokenizer,
    load_engine,
    play_references,
    serve_in_thread,
)


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    """Plays the desk's reference actions, with mistakes in half of the episodes."""
    from toolroll.testing import load_embedded_tokenizer

    desk = find_environment("desk")
    lines = play_references(desk, desk.tasks("test"), samples=2, mistakes=0.5, seed=4)

    def policy(request: PolicyRequest) -> str:
        """The script, by how often the assistant has spoken: an episode may be played several
        times.
        """
        said = lines.get(request.routing_key, ["Goodbye."])
        turn = request.text.count("<|turn|>assistant") - 1
        return said[turn] if turn < len(said) else "Goodbye."

    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), policy)) as served:
        yield served


def run(engine: EmbeddedEngine, *arguments: object) -> Result:
    return toolroll(*run_command(engine.url, *arguments))


def rows(result: Result) -> dict[str, str]:
    cells = [line.split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    return {row[1].strip(): row[2].strip() for row in cells}


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())["environments"][
        "desk"
    ]
    return found


def test_the_small_model_says_which_tasks_it_was_trained_on() -> None:
    options = ["--tasks", "0", "--max-turns", "1", "--no-do-nothing"]
    with serve_in_thread(load_engine(desk_model_path())) as served:
        command = ["run", "desk", "--engine", served.url, "--model", "desk-1m", *options]
        plain = toolroll(*command).stdout
        [warning] = [line for line in plain.splitlines() if "desk-1m was trained only" in line]
        named = shlex.split(warning.partition("of 0: ")[2])
        assert "was trained only" not in toolroll(*command, *named).stdout


def test_a_run_ends_in_a_table_and_files(engine: EmbeddedEngine, tmp_path: Path) -> None:
    result = run(engine, "--samples", 2, "--tasks", "0-9", "--out", tmp_path)
    assert result.exit_code == 0
    episodes = list(read_episodes(tmp_path))
    passed = sum(found.result.reward == 1.0 for found in episodes)
    assert 0 < passed < 20 == len(episodes)
    table, written = rows(result), summary(tmp_path)
    assert table["episodes"] == "20"
    assert table["reward (mean)"].startswith(f"{passed / 20:.3f} [")
    assert table["pass^1 = pass@1"] == table["reward (mean)"]
    assert table["pass^2"] == "{value:.3f} [{low:.2f}, {high:.2f}] ({tasks} tasks)".format(
        **written["pass^k"]["2"]
    )
    assert table["do-nothing baseline"] == "0/10"
    assert int(table["invalid calls"].split()[0]) == written["invalid_calls"]["total"] > 0
    bad_calls = [
        (found.result.messages[bad["message"]]["role"], bad["status"])
        for found in episodes
        for bad in found.result.info.get("bad_calls", [])
    ]
    assert {role for role, _ in bad_calls} == {"assistant"}
    assert Counter(status for _, status in bad_calls) == {
        kind: part["count"] for kind, part in written["invalid_calls"]["by_kind"].items()
    }
    assert (written["trainable"], written["episodes"], written["aborted"], written["warnings"]) == (
        True,
        20,
        0,
        [],
    )
    assert written["settings"]["env"] == "desk"
    assert len(written["settings"]["template"]) == 16
    assert written["tool_calls"]["by_tool"]["find_member"]["calls"] > 0
    assert (
        sum(found["calls"] for found in written["tool_calls"]["by_tool"].values())
        <= written["tool_calls"]["attempted"]
    )
    assert "desk: split test, model embedded, temperature 1.0, max_new_tokens" in result.stdout
    assert "desk: 20/20  reward" in result.stdout, "plain lines where there is no terminal"
    assert "exact" not in result.stdout, "the template is: nothing to be said"


@pytest.mark.parametrize(
    ("failing", "max_lost", "status", "cell"),
    [
        ([[5, 0]], "0.1", 0, "(10 tasks)"),
        ([[5, 0]], None, 1, "(10 tasks)"),
        ([[5, 0], [5, 1]], "0.1", 0, "(9 of 10 tasks)"),
    ],
)
def test_a_run_that_lost_too_many_episodes_does_not_look_like_a_success(
    engine: EmbeddedEngine,
    tmp_path: Path,
    failing: list[list[int]],
    max_lost: str | None,
    status: int,
    cell: str,
) -> None:
    file = tmp_path / "lossy.py"
    file.write_text(LOSSY)
    env_args = json.dumps({"failing": failing})
    options = ["--samples", 2, "--reruns", 0, "--out", tmp_path / "out", "--env-args", env_args]
    options += ["--max-lost", max_lost] if max_lost is not None else []
    result = toolroll(*run_command(engine.url, *options, env=f"{file}:Lossy"))
    assert result.exit_code == status, result.stdout
    assert rows(result)["reward (mean)"].endswith(cell)
    told = f"{len(failing)} of 20 episodes have no reward, and --max-lost allows" in result.stdout
    assert told is bool(status)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ("0", "desk: no episode has a reward\n"),
        ("0-1", "1 of 2 episodes have no reward, and --max-lost allows a share of 0.005\n"),
    ],
)
def test_an_episode_that_ended_without_a_reward_was_not_aborted(
    engine: EmbeddedEngine, tmp_path: Path, tasks: str, words: str
) -> None:
    command = ["--tasks", tasks, "--out", tmp_path / "out", "--max-lost", "0.005"]
    assert run(engine, *command).exit_code == 0
    file = tmp_path / "out" / "episodes.jsonl"
    file.write_bytes(re.sub(rb'"reward":[\d.]+,"step_rewards"', b'"reward":null,"step_rewards"',
                            file.read_bytes(), count=1))  # fmt: skip
    result = run(engine, *command)
    assert result.exit_code == 1
    assert words in result.stdout
    if tasks != "0" and find_spec("pyarrow"):  # a data set needs a graded episode
        exported = toolroll("export", tmp_path / "out", "--out", tmp_path / "data").stdout
        assert "1 of 2 tasks have no graded episode" in exported


def test_numbers_of_an_environment_and_bad_lines_break_no_folder(
    engine: EmbeddedEngine, tmp_path: Path
) -> None:
    file, out = tmp_path / "lossy.py", tmp_path / "out"
    file.write_text(LOSSY)
    command = run_command(engine.url, "--tasks", "0-3", "--out", out, env=f"{file}:Lossy")
    assert toolroll(*command).exit_code == 0
    episodes = out / "episodes.jsonl"
    first = episodes.read_bytes().splitlines(keepends=True)
    assert b'"env/turns":1e+99' in first[0].replace(b"1e99", b"1e+99")
    episodes.write_bytes(first[0] + first[1].replace(b'"turns":1.0', b'"turns":1e308') + first[2])
    again = toolroll(*command)
    assert again.exit_code == 0
    assert "line 2, is not a valid episode: " in again.stdout
    assert rows(again)["episodes"] == "4"
    export = ["export", out, "--out", tmp_path / "data", "--format", "atif"]
    for reading in (["view", out], export):
        assert "line 2, is not a valid episode: " in toolroll(*reading).stdout


@pytest.mark.parametrize("ending", ["give up", "usage"])
def test_a_run_that_ends_early_shows_what_was_played(
    engine: EmbeddedEngine,
    tmp_path: Path,
    ending: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "lossy.py"
    file.write_text(LOSSY)
    failing = [[task, 0] for task in range(4, 10)]
    command = [
        "toolroll", "run", f"{file}:Lossy", "--engine", engine.url, "--model", "embedded",
        "--parser", "hermes", "--concurrency", "1", "--reruns", "0", "--out", str(tmp_path / "out"),
        "--env-args", json.dumps({"failing": failing, "ending": ending}), "--give-up-after", "3",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert shown.err.startswith("toolroll: ") and ENDINGS[ending] in shown.err
    played = len(list(read_episodes(tmp_path / "out")))
    assert 4 <= played < 10
    assert f"the run is not finished: {played} of 10 episodes" in shown.out
    assert "(4 of 10 tasks)" in shown.out, "the table"
    assert (tmp_path / "out" / "summary.json").is_file()


ENDINGS = {
    "give up": "3 attempts at episodes failed in a row",
    "usage": "there is no database",
}


LOSSY = """
from toolroll import Environment, Observation, StepResult, Task
from toolroll.rollout.errors import UsageError

class Lossy(Environment):
    def __init__(self, failing=(), ending="give up"):
        self.failing, self.ending = failing, ending

    tasks = [Task(f"t-{index}", index) for index in range(10)]

    def reset(self, task, seed):
        Lossy.played = getattr(Lossy, "played", {})
        sample = Lossy.played[task.index] = Lossy.played.get(task.index, -1) + 1
        if [task.index, sample] in self.failing:
            if self.ending == "usage":
                raise UsageError("there is no database")
            raise RuntimeError("the database is gone")
        return Observation([{"role": "user", "content": "Hello."}])

    def step(self, action):
        return StepResult(reward=1.0, done=True)

    def metrics(self):
        return {"turns": 1e99, "invalid_calls": 2**70, "user_calls": 1e99, "sum": 1e308}
"""


def test_the_floor_is_of_all_tasks_in_the_folder(engine: EmbeddedEngine, tmp_path: Path) -> None:
    run(engine, "--tasks", "0-1", "--out", tmp_path, "--no-do-nothing")
    fewer = run(engine, "--tasks", "1,6", "--out", tmp_path)
    assert rows(fewer)["episodes"] == "3"
    assert "the table covers every episode in" in fewer.stdout
    same = run(engine, "--tasks", "0-1,6", "--out", tmp_path, "--no-do-nothing")
    assert "the table covers" not in same.stdout
    assert rows(fewer)["do-nothing baseline"] == "0/3"


def test_a_run_goes_on_grows_and_refuses_other_settings(
    engine: EmbeddedEngine, tmp_path: Path
) -> None:
    run(engine, "--tasks", "0-1", "--out", tmp_path, "--no-do-nothing")
    first = (tmp_path / "episodes.jsonl").read_bytes()
    (tmp_path / "episodes.jsonl").write_bytes(first[:-100])
    before = len(engine.log)
    again = run(engine, "--tasks", "0-1", "--out", tmp_path, "--concurrency", 2, "--no-do-nothing")
    assert "desk: 1 episodes are in" in again.stdout
    assert len({entry.routing_key for entry in engine.log[before:]}) == 1, (
        "only the torn one is played again"
    )
    grown = run(engine, "--tasks", "0-2", "--samples", 2, "--out", tmp_path, "--no-do-nothing")
    assert rows(grown)["episodes"] == "6"
    assert rows(grown)["do-nothing baseline"] == "-"
    keys = [(found.task_id, found.sample) for found in read_episodes(tmp_path)]
    assert len(keys) == len(set(keys)) == 6
    with pytest.raises(UsageError, match=r"temperature: recorded 1.0, now 0.5\n"):
        run(engine, "--tasks", "0-2", "--samples", 2, "--out", tmp_path, "--temperature", 0.5)
    with pytest.raises(UsageError, match=r"template: recorded"):
        run(engine, "--out", tmp_path, "--chat-template-kwargs", '{"a": 1}')


def test_a_complete_run_shows_its_table_again_without_an_engine(
    engine: EmbeddedEngine, tmp_path: Path
) -> None:
    options = ["--samples", 2, "--tasks", "0-3", "--out", tmp_path, "--engine-timeout", 0]
    first = rows(run(engine, *options))
    again = toolroll(*run_command("http://127.0.0.1:9", *options))
    assert again.exit_code == 0
    shown = [rows(again), rows(toolroll("view", tmp_path))]
    assert shown == [first, first], "with the time and the do-nothing baseline"
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:3]))
    assert rows(toolroll("view", tmp_path))["episodes"] == "3"
    with pytest.raises(UsageError, match=r"the engine at http://127\.0\.0\.1:9"):
        toolroll(*run_command("http://127.0.0.1:9", *options))


def test_settings_come_from_a_file_and_the_command_line_overrules_it(
    engine: EmbeddedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"engine: {engine.url}\nmodel: embedded\nparser: hermes\ntasks: 0-2\nsamples: 2\n"
        f"do_nothing: false\nout: {tmp_path / 'out'}\n"
    )
    result = toolroll("run", "desk", "--config", file, "--samples", 1)
    assert rows(result)["episodes"] == "3"
    assert rows(result)["do-nothing baseline"] == "-"
    file.write_text(f"env: desk\n{file.read_text()}")
    out = ["--out", tmp_path / "again"]
    assert rows(toolroll("run", "--config", file, *out))["episodes"] == "6", "env is in the file"
    with pytest.raises(UsageError, match="but the command plays 'bfcl"):
        toolroll("run", "bfcl/multi_turn_base", "--config", file)
    with pytest.raises(UsageError, match="name an environment"):
        toolroll("run", "--model", "embedded")


CLOSES = """
from toolroll import Environment, Observation, StepResult, UsageError

class Closes(Environment):
    def __init__(self, word="x"):
        self.word = word
    def reset(self, task, seed):
        self.opened = [self.word]
        return Observation([{"role": "user", "content": self.word}])
    def step(self, action):
        return StepResult(reward=1.0, done=True)
    def check_task(self, task):
        if self.word == "wrong":
            raise UsageError("the word is wrong")
    def close(self):
        self.opened.clear()
"""


def test_what_is_made_before_the_first_episode_is_not_closed(
    engine: EmbeddedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "closes.py"
    file.write_text(CLOSES)
    options = ("--engine", engine.url, "--model", "embedded", "--parser", "hermes")
    args = ("run", f"{file}:Closes", *options, "--env-args")
    assert rows(toolroll(*args, '{"word": "right"}'))["episodes"] == "1"
    with pytest.raises(UsageError, match="the word is wrong"):
        toolroll(*args, '{"word": "wrong"}')


def test_a_terminal_says_what_the_start_waits_for(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []

    class Said(Status):
        def __init__(self, status: Any, **settings: Any) -> None:
            steps.append(status)
            super().__init__(status, **settings)

        def update(self, status: Any = None, **settings: Any) -> None:
            steps.append(status)
            super().update(status, **settings)

    monkeypatch.setattr("rich.status.Status", Said)
    result = run(engine, "--tasks", "0")
    assert steps == [
        "Starting",
        "Loading the environment and the tokenizer",
        "Waiting for the engine",
        "Checking the chat template",
        "Playing the do-nothing baseline",
    ]
    assert not [step for step in steps if step in result.stdout], "nothing in a log"


def test_a_template_that_is_not_exact_is_said_before_the_run(
    engine: EmbeddedEngine, tmp_path: Path, tokenizer: Any
) -> None:
    # its head changes with every message: history is rewritten
    counting = tmp_path / "counting.jinja"
    counting.write_text(
        tokenizer.chat_template.replace(
            "<|turn|>system\n{{ lead }}", "<|turn|>system\n{{ lead }} ({{ messages | length }})", 1
        )
    )
    result = run(
        engine,
        "--tasks",
        "0",
        "--chat-template",
        counting,
        "--out",
        tmp_path / "out",
        "--no-do-nothing",
    )
    told = " ".join(result.stdout.split())
    assert "history=fork: a tool episode (4 user messages with 2 calls each" in told
    assert "becomes 12 sequences" in told
    assert "The chat template does not append tool results to the earlier tokens:" in result.stdout
    assert "a second training sequence begins there, unless history='preserve'" in result.stdout
    assert summary(tmp_path / "out")["forks"] > 0


FILE = """
from toolroll import Action, Environment, Observation, StepResult, Task

class Waiter(Environment):
    tasks = [{"id": "a"}, {"id": "b"}, {"id": "c"}]

    def __init__(self, line: str = "Hello."):
        self.line = line

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": self.line}])

    def step(self, action: Action) -> StepResult:
        return StepResult(reward=float(self.line == "Bye."), done=True)
"""


def test_an_environment_of_a_file_is_played_and_resumed(
    engine: EmbeddedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another path of the same file too, and with the arguments of the command line."""
    (tmp_path / "wait.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    common = ("--engine", engine.url, "--model", "embedded", "--parser", "hermes", "--out", out)
    given = ("--env-args", '{"line": "Bye."}')
    first = toolroll("run", "wait.py:Waiter", *common, *given, "--tasks", "0-1")
    assert first.exit_code == 0, first.output
    again = toolroll("run", tmp_path / "wait.py:Waiter", *common, *given)
    assert "wait:Waiter: 2 episodes are in" in again.stdout
    assert [(e.env, e.task_id, e.result.reward) for e in read_episodes(out)] == [
        ("wait:Waiter", "a", 1.0),
        ("wait:Waiter", "b", 1.0),
        ("wait:Waiter", "c", 1.0),
    ]
    with pytest.raises(UsageError, match=r"env_args: recorded .*Bye.*, now \{\}"):
        toolroll("run", "wait.py:Waiter", *common)
    with pytest.raises(UsageError, match="there is no argument 'lin'; did you mean 'line'"):
        toolroll("run", "wait.py:Waiter", *common, "--env-args", '{"lin": 3}')
    with pytest.raises(UsageError, match="--env-args is not JSON"):
        toolroll("run", "wait.py:Waiter", *common, "--env-args", "line=3")


def test_an_edited_environment_is_another_one(
    engine: EmbeddedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "wait.py"
    common = ("--engine", engine.url, "--model", "embedded", "--parser", "hermes", "--tasks", "0")

    def played(text: str, out: str) -> Result:
        file.write_text(text)
        return toolroll("run", "wait.py:Waiter", *common, "--out", out)

    assert played(FILE, "out").exit_code == 0
    assert "1 episodes are in out already" in played(f"{FILE}# a comment", "out").stdout
    edited = FILE.replace("float(self.line ==", "float(self.line !=")
    assert edited != FILE
    with pytest.raises(UsageError, match="environment: code: recorded "):
        played(edited, "out")
    assert played(edited, "other").exit_code == 0
    with pytest.raises(
        UsageError, match=r"benchmark: environment: code: baseline .*\n.*--allow-diff"
    ):
        toolroll("compare", "out", "other")
    lines = (tmp_path / "other" / "episodes.jsonl").read_text()
    with (tmp_path / "out" / "episodes.jsonl").open("a") as out:
        out.write(lines)
    assert "an earlier line has the same sample, wait:Waiter/a/0" in toolroll("view", "out").output
    with (tmp_path / "out" / "episodes.jsonl").open("a") as out:
        out.write(lines.replace('"sample":0', '"sample":1'))
    with pytest.raises(UsageError, match="baseline has episodes of 2 versions of the environment"):
        toolroll("compare", "out", "out")


def test_a_sampling_parameter_has_one_home(
    engine: EmbeddedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ("--tasks", "0", "--max-turns", "1")

    def params(**values: Any) -> tuple[str, str]:
        return "--sampling-params", json.dumps(values)

    with pytest.raises(UsageError, match=r"--temperature is 0.9, and --sampling-params says 0.1"):
        run(engine, *own, "--temperature", 0.9, *params(temperature=0.1))
    for out, options in {
        "a": params(temperature=0.5, top_k=7, ignore_eos=False),
        "b": ("--temperature", 0.5, *params(top_k=7, ignore_eos=False)),
        "c": params(temperature=0.5, max_new_tokens=12),
    }.items():
        assert run(engine, *own, "--out", out, *options).exit_code == 0
    settings = json.loads(Path("a", "run.json").read_text())["environments"]["desk"]
    found = [settings[name] for name in ("temperature", "top_k", "sampling_params")]
    assert found == [0.5, 7, {"ignore_eos": False}]
    assert "also different" not in toolroll("compare", "a", "b").stdout
    with pytest.raises(UsageError, match="limits: max_new_tokens: baseline 32768, candidate 12"):
        toolroll("compare", "a", "c")
    for name, wrong in (("a", 0.1), ("b", 0.9)):  # what was sampled counts
        file = Path(name, "run.json")
        file.write_text(file.read_text().replace('"temperature": 0.5', f'"temperature": {wrong}'))
    assert "also different" not in toolroll("compare", "a", "b").stdout


HOSTILE = "[bold] :smile:"


def test_names_are_printed_as_they_are(
    engine: EmbeddedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No name is markup for rich: it would vanish, or end the command with a traceback."""
    monkeypatch.chdir(tmp_path)
    file, out = Path(f"{HOSTILE}.py"), Path(f"[/red] {HOSTILE}")
    toolroll("new-env", "hostile-names")
    file.write_text(Path("hostile_names.py").read_text())
    name = f"{HOSTILE}:env"
    assert name in toolroll("check-env", f"{file}:env").stdout
    written = toolroll("tasks", f"{file}:env", "--out", f"{out}.jsonl")
    assert f"tasks: {out}.jsonl" in written.stdout
    command = ["run", f"{file}:env", "--model", "embedded", "--engine", engine.url]
    done = toolroll(*command, "--parser", "hermes", "--out", out)
    assert done.exit_code == 0
    assert f"In {out}: run.json" in done.stdout and name in done.stdout.split("\n")[1]
    assert any(line.startswith("┃") and name in line for line in done.stdout.splitlines())
    again = toolroll(*command, "--parser", "hermes", "--out", out)
    assert f"episodes are in {out} already" in again.stdout
    assert str(out) in toolroll("view", out).stdout


def test_an_evaluation_samples_as_the_model_says(
    engine: EmbeddedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    load_embedded_tokenizer().save_pretrained(model)
    given = {"temperature": 0.0, "top_p": 0.95, "top_k": 0, "repetition_penalty": "x"}
    (model / "generation_config.json").write_text(json.dumps(given))
    command = ("run", "desk", "--engine", engine.url, "--model", model, "--parser", "hermes")
    result = toolroll(*command, "--tasks", "0", "--top-p", 0.5, "--out", "out")
    line = "sampling: temperature 0.0, top_p 0.5, max_new_tokens 32768; from the model's "
    assert f"{line}generation_config.json: temperature\n" in result.stdout
    settings = json.loads(Path("out", "run.json").read_text())["environments"]["desk"]
    [episode] = read_episodes(Path("out"))
    sampled = episode.result.trajectories[0].turns[0].sampling_params
    for found in (settings, sampled):
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        assert [found.get(name) for name in names] == [0.0, 0.5, None, None]
    assert settings["max_new_tokens"] == 32768
    room = engine.context_length - episode.result.trajectories[0].prompt_length
    assert sampled["max_new_tokens"] == min(32768, room)
    again = toolroll(*command, "--tasks", "0-1", "--max-new-tokens", 2, "--out", "cut")
    assert "2 of 2 episodes ended because a turn reached --max-new-tokens (2)" in again.stdout
