"""`toolroll run`: from the command line to the table, the files, and a resumed run."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.status import Status
from support.commands import run_command, toolroll
from typer.testing import CliRunner, Result

from toolroll import UsageError, read_episodes
from toolroll.cli.app import app
from toolroll.rollout.model.tokenizers import desk_model_path, load_embedded_tokenizer
from toolroll.rollout.runs.registry import find_environment
from toolroll.testing import EmbeddedEngine, PolicyRequest, play_references, serve_in_thread
from toolroll.testing.serve import load_engine

MINE = """
import os
import signal

from toolroll import Environment, Observation, StepResult, Task, UsageError

class Mine(Environment):
    tasks = [Task(f"t-{index}", index) for index in range(10)]

    def __init__(self, failing=(), ending="give up", line: str = "Hello."):
        self.failing, self.ending, self.line = failing, ending, line

    def check_task(self, task):
        if self.line == "wrong":
            raise UsageError("the line is wrong")

    def reset(self, task, seed):
        self.opened = [task]
        mode = os.environ.get("MINE_MODE")
        if mode == "fail":
            raise RuntimeError("it failed")
        if mode == "stop":
            os.kill(os.getpid(), signal.SIGINT)
        Mine.played = getattr(Mine, "played", {})
        sample = Mine.played[task.index] = Mine.played.get(task.index, -1) + 1
        if [task.index, sample] in self.failing:
            if self.ending == "usage":
                raise UsageError("there is no database")
            raise RuntimeError("the database is gone")
        return Observation([{"role": "user", "content": self.line}])

    def step(self, action):
        return StepResult(reward=float(self.line != "Bye."), done=True)


    def close(self):
        self.opened.clear()
"""
OUT = Path("out")


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    """Plays the desk's reference actions, with mistakes in half of the episodes."""
    desk = find_environment("desk")
    lines = play_references(desk, desk.tasks("test"), samples=2, mistakes=0.5, seed=4)

    def policy(request: PolicyRequest) -> str:
        """The script, by how often the assistant has spoken: an episode may be played again."""
        replies = lines.get(request.routing_key, ["Goodbye."])
        turn = request.text.count("<|turn|>assistant") - 1
        return replies[turn] if turn < len(replies) else "Goodbye."

    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), policy)) as served:
        yield served


@pytest.fixture(autouse=True)
def mine(here: Path) -> None:
    (here / "mine.py").write_text(MINE)


@pytest.fixture
def run(engine: EmbeddedEngine) -> Callable[..., Result]:
    """`toolroll run` with these arguments, of the desk if it is not told otherwise."""
    return lambda *arguments, **env: toolroll(*run_command(engine.url, *arguments, **env))


def rows(result: Result) -> dict[str, str]:
    cells = [line.split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    return {row[1].strip(): row[2].strip() for row in cells}


def summary() -> dict[str, Any]:
    return json.loads((OUT / "summary.json").read_text())["environments"]["desk"]


def test_the_small_model_says_which_tasks_it_was_trained_on() -> None:
    options = ["--tasks", "0", "--max-turns", "1", "--no-do-nothing"]
    with serve_in_thread(load_engine(desk_model_path())) as served:
        command = ["run", "desk", "--engine", served.url, "--model", "desk-1m", *options]
        plain = toolroll(*command).stdout
        [warning] = [line for line in plain.splitlines() if "desk-1m was trained only" in line]
        named = shlex.split(warning.partition("of 0: ")[2])
        assert "was trained only" not in toolroll(*command, *named).stdout


def test_a_run_ends_in_a_table_and_files(run: Any) -> None:
    result = run("--samples", 2, "--tasks", "0-9", "--out", OUT)
    assert result.exit_code == 0
    episodes = list(read_episodes(OUT))
    passed = sum(played.result.reward == 1.0 for played in episodes)
    assert 0 < passed < 20 == len(episodes)
    table, written = rows(result), summary()
    assert table["episodes"] == "20"
    assert table["reward (mean)"].startswith(f"{passed / 20:.3f} [")
    assert table["pass^1 = pass@1"] == table["reward (mean)"]
    assert table["pass^2"] == "{value:.3f} [{low:.2f}, {high:.2f}] ({tasks} tasks)".format(
        **written["pass^k"]["2"]
    )
    assert table["do-nothing baseline"] == "0/10"
    assert int(table["invalid calls"].split()[0]) == written["invalid_calls"]["total"] > 0
    names = ("trainable", "episodes", "aborted", "warnings")
    assert [written[name] for name in names] == [True, 20, 0, []]
    assert written["settings"]["env"] == "desk"
    assert len(written["settings"]["template"]) == 16
    assert "desk: split test, model embedded, temperature 1.0, max_new_tokens" in result.stdout
    assert "desk: 20/20  reward" in result.stdout, "plain lines where there is no terminal"
    assert "exact" not in result.stdout, "the template is: nothing to be said"


@pytest.mark.parametrize(
    ("failing", "max_lost", "status", "cell"),
    [
        ([[5, 0]], ["--max-lost", "0.1"], 0, "(10 tasks)"),
        ([[5, 0]], [], 1, "(10 tasks)"),
        ([[5, 0], [5, 1]], ["--max-lost", "0.1"], 0, "(9 of 10 tasks)"),
    ],
)
def test_a_run_that_lost_too_many_episodes_is_no_success(
    run: Any, failing: list[list[int]], max_lost: list[str], status: int, cell: str
) -> None:
    args = ["--env-args", json.dumps({"failing": failing}), *max_lost]
    result = run("--samples", 2, "--reruns", 0, "--out", OUT, *args, env="mine.py:Mine")
    assert result.exit_code == status, result.stdout
    assert rows(result)["reward (mean)"].endswith(cell)
    words = f"{len(failing)} of 20 episodes have no reward, and --max-lost allows"
    assert (words in result.stdout) is bool(status)


def test_an_episode_without_a_reward_was_not_aborted(run: Any) -> None:
    command = ["--out", OUT, "--max-lost", "0.005", "--tasks"]
    assert run(*command, "0").exit_code == 0
    file = OUT / "episodes.jsonl"
    reward, none = r'"reward":[\d.]+,"step_rewards"', '"reward":null,"step_rewards"'
    file.write_text(re.sub(reward, none, file.read_text(), count=1))
    for tasks, words in (
        ("0", "desk: no episode has a reward\n"),
        ("0-1", "1 of 2 episodes have no reward, and --max-lost allows a share of 0.005\n"),
    ):
        result = run(*command, tasks)
        assert result.exit_code == 1
        assert words in result.stdout
    if find_spec("pyarrow"):  # a data set needs a graded episode
        exported = toolroll("export", OUT, "--out", "data").stdout
        assert "1 of 2 tasks have no graded episode" in exported


@pytest.mark.parametrize(
    ("ending", "words"),
    [("give up", "3 attempts at episodes failed in a row"), ("usage", "there is no database")],
)
def test_a_run_that_ends_early_is_shown(engine: Any, ending: str, words: str, command: Any) -> None:
    env_args = json.dumps({"failing": [[task, 0] for task in range(4, 10)], "ending": ending})
    options = "--concurrency 1 --reruns 0 --out out --give-up-after 3 --env-args".split()
    run = run_command(engine.url, *options, env_args, env="mine.py:Mine")
    status, output, errors = command(*run)
    assert status == 2
    assert errors.startswith("toolroll: ") and words in errors
    played = len(list(read_episodes(OUT)))
    assert 4 <= played < 10
    assert f"the run is not finished: {played} of 10 episodes" in output
    assert "(4 of 10 tasks)" in output, "the table"
    assert (OUT / "summary.json").is_file()


def test_the_floor_is_of_all_tasks_in_the_folder(run: Any) -> None:
    run("--tasks", "0-1", "--out", OUT, "--no-do-nothing")
    fewer = run("--tasks", "1,6", "--out", OUT)
    assert rows(fewer)["episodes"] == "3"
    assert "the table also covers other tasks" in fewer.stdout
    same = run("--tasks", "0-1,6", "--out", OUT, "--no-do-nothing")
    assert "the table also covers" not in same.stdout
    assert rows(fewer)["do-nothing baseline"] == "0/3"


def test_a_run_goes_on_grows_and_refuses_other_settings(run: Any, engine: EmbeddedEngine) -> None:
    common = ("--out", OUT, "--no-do-nothing")
    run("--tasks", "0-1", *common)
    file = OUT / "episodes.jsonl"
    file.write_bytes(b"no episode\n" + file.read_bytes()[:-100])
    before = len(engine.log)
    again = run("--tasks", "0-1", "--concurrency", 2, *common)
    assert "desk: 1 episodes are in" in again.stdout
    assert "line 1, is not a valid episode: " in again.stdout
    file.write_bytes(file.read_bytes().removeprefix(b"no episode\n"))
    played = {entry.routing_key for entry in engine.log[before:]}
    assert len(played) == 1, "only the torn one is played again"
    grown = run("--tasks", "0-2", "--samples", 2, *common)
    assert (rows(grown)["episodes"], rows(grown)["do-nothing baseline"]) == ("6", "-")
    keys = [(found.task_id, found.sample) for found in read_episodes(OUT)]
    assert len(keys) == len(set(keys)) == 6
    assert "sampling: temperature 1.0" in grown.stdout
    command = run_command(engine.url, "--out", OUT, "--temperature", 0.5)
    refused = CliRunner().invoke(app, command)
    assert "temperature: recorded 1.0, now 0.5\n" in str(refused.exception)
    assert "sampling:" not in refused.stdout, "it will not be used"
    with pytest.raises(UsageError, match=r"template: recorded"):
        run("--out", OUT, "--chat-template-kwargs", '{"a": 1}')


def test_a_complete_run_shows_its_table_without_an_engine(run: Any) -> None:
    options = ["--samples", 2, "--tasks", "0-3", "--out", OUT, "--engine-timeout", 0]
    dead = run_command("http://127.0.0.1:9", *options)
    first, again = rows(run(*options)), toolroll(*dead)
    assert again.exit_code == 0
    shown = [rows(again), rows(toolroll("view", OUT))]
    assert shown == [first, first], "with the time and the do-nothing baseline"
    file = OUT / "episodes.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:3]))
    assert rows(toolroll("view", OUT))["episodes"] == "3"
    with pytest.raises(UsageError, match=r"the engine at http://127\.0\.0\.1:9"):
        toolroll(*dead)


def test_the_time_is_that_of_all_commands(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All episodes of the first are aborted, the second is stopped before its first one, and
    nothing is left for the last.
    """
    file, earlier = OUT / "summary.json", 0.0
    for mode, status in (("fail", 1), ("stop", 130), ("play", 0), ("", 0)):
        monkeypatch.setenv("MINE_MODE", mode)
        options = ["--tasks", "0-1", "--reruns", 0, "--no-do-nothing", "--out", OUT]
        result = run(*options, env="mine.py:Mine")
        found = json.loads(file.read_text())
        [part] = found["environments"].values()
        assert (result.exit_code, part["seconds"] > earlier) == (status, bool(mode))
        assert rows(result)["time"] == f"{part['seconds']:.1f} s"
        earlier = part["seconds"] = part["seconds"] + 5000.0
        file.write_text(json.dumps(found))


def test_the_command_line_overrules_a_file_of_settings(engine: EmbeddedEngine) -> None:
    file = Path("run.yaml")
    file.write_text(
        f"engine: {engine.url}\nmodel: embedded\nparser: hermes\ntasks: 3\nsamples: 2\n"
        "do_nothing: false\nout: out\n"
    )
    table = rows(toolroll("run", "desk", "--config", file, "--samples", 1))
    assert (table["episodes"], table["do-nothing baseline"]) == ("1", "-")
    file.write_text(f"env: desk\n{file.read_text()}")
    again = toolroll("run", "--config", file, "--out", "again")
    assert rows(again)["episodes"] == "2", "env is in the file"
    with pytest.raises(UsageError, match="but the command plays 'bfcl"):
        toolroll("run", "bfcl/multi_turn_base", "--config", file)
    with pytest.raises(UsageError, match="name an environment"):
        toolroll("run", "--model", "embedded")


def test_what_is_made_before_the_first_episode_is_not_closed(run: Any) -> None:
    assert rows(run(env="mine.py:Mine"))["episodes"] == "10"
    with pytest.raises(UsageError, match="the line is wrong"):
        run("--env-args", '{"line": "wrong"}', env="mine.py:Mine")


def test_a_template_that_is_not_exact_is_said_before_the_run(run: Any, tokenizer: Any) -> None:
    # its head changes with every message: history is rewritten
    head = "<|turn|>system\n{{ lead }}"
    counting = tokenizer.chat_template.replace(head, head + " ({{ messages | length }})", 1)
    Path("counting.jinja").write_text(counting)
    options = ["--tasks", "0", "--chat-template", "counting.jinja", "--no-do-nothing"]
    result = run(*options, "--out", OUT)
    told = " ".join(result.stdout.split())
    assert "history=fork: a tool episode (4 user messages with 2 calls each" in told
    assert "becomes 12 sequences" in told
    assert "The chat template does not append tool results to the earlier tokens:" in result.stdout
    assert "a second training sequence begins there, unless history='preserve'" in result.stdout
    assert summary()["forks"] > 0


def test_versions_of_an_environment_are_not_mixed(run: Any) -> None:
    for text, folder in ((MINE, "out"), (MINE.replace("!=", "=="), "other")):
        Path("mine.py").write_text(text)
        assert run("--tasks", "0", "--out", folder, env="mine.py:Mine").exit_code == 0
    lines = Path("other", "episodes.jsonl").read_text()
    with (OUT / "episodes.jsonl").open("a") as out:
        out.write(lines)
    assert "an earlier line has the same sample, mine:Mine/t-0/0" in toolroll("view", "out").output
    with (OUT / "episodes.jsonl").open("a") as out:
        out.write(lines.replace('"sample":0', '"sample":1'))
    with pytest.raises(UsageError, match="baseline has episodes of 2 versions of the environment"):
        toolroll("compare", "out", "out")


def test_a_sampling_parameter_has_one_home(run: Any) -> None:
    own = ("--tasks", "0", "--max-turns", "1")

    def params(**values: Any) -> tuple[str, str]:
        return "--sampling-params", json.dumps(values)

    with pytest.raises(UsageError, match=r"--temperature is 0.9, and --sampling-params says 0.1"):
        run(*own, "--temperature", 0.9, *params(temperature=0.1))
    for out, options in {
        "a": params(temperature=0.5, top_k=7, ignore_eos=False),
        "b": ("--temperature", 0.5, *params(top_k=7, ignore_eos=False)),
        "c": params(temperature=0.5, max_new_tokens=12),
    }.items():
        assert run(*own, "--out", out, *options).exit_code == 0
    settings = json.loads(Path("a", "run.json").read_text())["environments"]["desk"]
    recorded = [settings[name] for name in ("temperature", "top_k", "sampling_params")]
    assert recorded == [0.5, 7, {"ignore_eos": False}]
    assert "also different" not in toolroll("compare", "a", "b").stdout
    with pytest.raises(UsageError, match="limits: max_new_tokens: baseline 32768, candidate 12"):
        toolroll("compare", "a", "c")
    for name, wrong in (("a", 0.1), ("b", 0.9)):  # what was sampled counts
        file = Path(name, "run.json")
        file.write_text(file.read_text().replace('"temperature": 0.5', f'"temperature": {wrong}'))
    assert "also different" not in toolroll("compare", "a", "b").stdout


HOSTILE = "[bold] :smile:"


def test_names_are_printed_as_they_are(run: Any) -> None:
    """No name is markup for rich: it would vanish, or end the command with a traceback."""
    file, out = Path(f"{HOSTILE}.py"), Path(f"[/red] {HOSTILE}")
    toolroll("new-env", "hostile-names")
    file.write_text(Path("hostile_names.py").read_text())
    name = f"{HOSTILE}:env"
    assert name in toolroll("check-env", f"{file}:env").stdout
    written = toolroll("tasks", f"{file}:env", "--out", f"{out}.jsonl")
    assert f"tasks: {out}.jsonl" in written.stdout
    done = run("--out", out, env=f"{file}:env")
    assert done.exit_code == 0
    lines = done.stdout.split("\n")
    assert f"In {out}: run.json" in done.stdout and name in lines[1]
    assert any(line.startswith("┃") and name in line for line in lines)
    again = run("--out", out, env=f"{file}:env")
    assert f"episodes are in {out} already" in again.stdout
    assert str(out) in toolroll("view", out).stdout


def test_an_evaluation_samples_as_the_model_says(engine: EmbeddedEngine) -> None:
    model = Path("model").absolute()
    load_embedded_tokenizer().save_pretrained(model)
    given = {"temperature": 0.0, "top_p": 0.95, "top_k": 0, "repetition_penalty": "x"}
    (model / "generation_config.json").write_text(json.dumps(given))
    command = ("run", "desk", "--engine", engine.url, "--model", model, "--parser", "hermes")
    result = toolroll(*command, "--tasks", "0", "--top-p", 0.5, "--out", OUT)
    line = "sampling: temperature 0.0, top_p 0.5, max_new_tokens 32768; from the model's "
    assert f"{line}generation_config.json: temperature\n" in result.stdout
    settings = json.loads((OUT / "run.json").read_text())["environments"]["desk"]
    [episode] = read_episodes(OUT)
    sampled = episode.result.trajectories[0].turns[0].sampling_params
    for params in (settings, sampled):
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        assert [params.get(name) for name in names] == [0.0, 0.5, None, None]
    assert settings["max_new_tokens"] == 32768
    room = engine.context_length - episode.result.trajectories[0].prompt_length
    assert sampled["max_new_tokens"] == min(32768, room)
    again = toolroll(*command, "--tasks", "0-1", "--max-new-tokens", 2, "--out", "cut")
    assert "2 of 2 episodes ended because a turn reached --max-new-tokens (2)" in again.stdout


def test_a_terminal_says_what_a_start_waits_for(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    class Recorded(Status):
        def __init__(self, status: Any, **settings: Any) -> None:
            steps.append(status)
            super().__init__(status, **settings)

        def update(self, status: Any = None, **settings: Any) -> None:
            steps.append(status)
            super().update(status, **settings)

    monkeypatch.setattr("rich.status.Status", Recorded)
    result = run("--tasks", "0")
    assert steps == [
        "Starting",
        "Loading the environment and the tokenizer",
        "Waiting for the engine",
        "Checking the chat template",
        "Playing the do-nothing baseline",
    ]
    assert not [step for step in steps if step in result.stdout], "nothing in a log"
