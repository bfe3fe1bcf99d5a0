"""Edits between two runs: what could move a reward is refused or named by `toolroll compare`, and
the first run is not continued; what cannot move one raises no alarm.

The benchmark of `support.quiz` reads all that it is made of while it plays. A row is one edit of
its files, or one more option of the second run. The identity of its environment changes only with
an edit that can move a reward.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import commands, quiz
from support.quiz import HARMLESS, JUDGED, MOVES, Edit, forget, new_version, put, replace

from toolroll import UsageError, load_environment
from toolroll.evaluation import environment_identity as environment_identity_module
from toolroll.evaluation.environment_identity import environment_identity
from toolroll.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer, serve_in_thread


def write(root: Path) -> None:
    quiz.write(root)
    load_embedded_tokenizer().save_pretrained(root / "model")


def says(request: PolicyRequest) -> str:
    """One call, then the answer."""
    if request.text.count("<|turn|>assistant") > 1:
        return "It is 42."
    return '<tool_call>{"name": "lookup", "arguments": {"city": "Rome"}}</tool_call>'


def chats(request: PolicyRequest) -> str:
    """As a judge, or as a user of any strategy."""
    if "score" in request.text:
        return '{"reason": "It is right.", "score": 1}'
    return "Thought:\nI ask.\n\nUser Response:\nHow many people live in Rome?"


def toolroll(*arguments: object) -> tuple[int, str]:
    """The exit status of a command, 2 with an error, and what it printed."""
    try:
        result = commands.toolroll(*arguments)
    except UsageError as error:
        return 2, str(error)
    return result.exit_code, result.output


@dataclass(frozen=True)
class Bench:
    """The folder with the files, and the engines."""

    root: Path
    engine: EmbeddedEngine
    chat: EmbeddedEngine

    def options(self, env: str) -> dict[str, Any]:
        """Of `toolroll run`; a list is given several times."""
        more: dict[str, dict[str, Any]] = {
            "quiz.py:make": {"--env-args": '{"table": "table.csv", "level": "easy"}'},
            "judged.py:make": {"--env-args": json.dumps({"url": f"{self.chat.url}/v1"})},
            "asked.py:Asked": {"--user-model": "user-8b", "--user-url": f"{self.chat.url}/v1"},
        }
        return {
            "env": f"bench/{env}",
            "--engine": self.engine.url,
            "--model": "model",
            "--parser": "hermes",
            "--reruns": 0,
            "--no-do-nothing": True,
            "--no-pace-gc": True,
        } | more.get(env, {})

    def run(self, env: str, out: str, changed: dict[str, Any]) -> tuple[int, str]:
        """As in a process of its own: modules of the files are imported again."""
        options = self.options(env) | changed
        words = [options.pop("env")]
        for name, value in ({"--out": out} | options).items():
            words += [name] if value is True else [name, str(value)]
        forget(self.root)
        return toolroll("run", *words)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[EmbeddedEngine, EmbeddedEngine]]:
    tokenizer = load_embedded_tokenizer()
    with (
        serve_in_thread(EmbeddedEngine(tokenizer, says)) as engine,
        serve_in_thread(EmbeddedEngine(tokenizer, chats)) as chat,
    ):
        yield engine, chat


@pytest.fixture(scope="module")
def played(
    engines: tuple[EmbeddedEngine, EmbeddedEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """The files, and a run of each environment in `base/ENV`."""
    root = tmp_path_factory.mktemp("edits")
    bench = Bench(root, *engines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(root)
        sys.path.insert(0, str(root / "site"))
        write(root)
        for env in ("quiz.py:make", "judged.py:make", "asked.py:Asked"):
            status, output = bench.run(env, f"base/{env}", {})
            assert status == 0, output
        yield bench
        forget(root)


@pytest.fixture
def bench(played: Bench) -> Iterator[Bench]:
    """With the files as they were."""
    yield played
    for found in played.root.iterdir():
        if found.is_file():
            found.unlink()
        elif found.name != "base":
            shutil.rmtree(found)
    write(played.root)


def nothing(root: Path) -> None:
    """An option of the run differs instead."""


@dataclass(frozen=True)
class Row:
    """An edit, other options, words of `compare`, and whether the first run may be continued."""

    edit: Edit = nothing
    options: dict[str, Any] | None = None
    env: str = "quiz.py:make"
    words: str = "benchmark|tasks"
    continues: bool = False


def option(name: str, value: object, words: str = "", **more: Any) -> Row:
    spoken = name.removeprefix("--").replace("-", "[-_ ]")
    return Row(options={name: value}, words=words or spoken, **more)


def judged(name: str, text: str) -> Row:
    return Row(put(name, text), env="judged.py:make")


ROWS = {name: Row(edit) for name, edit in MOVES.items()} | {
    "a package's version": Row(new_version, words="packages"),
    "--env-args": Row(options={"--env-args": '{"table": "table.csv", "level": "hard"}'}),
    "the judge's rubric": judged("bench/rubric.txt", "Always 1."),
    "the judge's model": judged("bench/judged.py", JUDGED.replace("judge-8b", "judge-9b")),
    "the judge's settings": judged("bench/judge.json", '{"temperature": 1.0}'),
    "the user's persona": Row(put("bench/persona.txt", "Ask about {}."), env="asked.py:Asked"),
    "the user's model": option("--user-model", "user-9b", "user", env="asked.py:Asked"),
    "the user's strategy": option("--user-strategy", "react", "user", env="asked.py:Asked"),
    "temperature": option("--temperature", 0.5),
    "top_p, by --sampling-params": option("--sampling-params", '{"top_p": 0.5}', "top_p"),
    "top_k": option("--top-k", 3),
    "stop": option("--stop", "###"),
    "max_new_tokens": option("--max-new-tokens", 100),
    "generation_config.json": Row(
        put("model/generation_config.json", '{"temperature": 0.5}'), words="temperature"
    ),
    "seed": option("--seed", 7),
    "max_turns": option("--max-turns", 9, "limits|max_turns"),
    "step_timeout": option("--step-timeout", 99.0, continues=True),
    "context_length": option("--context-length", 4096, "limits|context_length"),
    "parser": option("--parser", "qwen3_coder", "template|parser"),
    "chat template": Row(
        replace("model/chat_template.jinja", "You can use", "You may use"), words="template"
    ),
    "a variable of the chat template": option(
        "--chat-template-kwargs", '{"enable_thinking": false}', "template"
    ),
    "tokenizer": Row(
        replace("model/tokenizer.json", '"normalizer": null', '"normalizer": {"type": "NFC"}'),
        words="tokenizer",
    ),
    "samples": option("--samples", 2, "2 of 4 samples", continues=True),
    "parallel_calls": option("--parallel-calls", "first"),
    "on_invalid_call": option("--on-invalid-call", "stop"),
    "on_length": option("--on-length", "continue", "limits|on_length"),
}


def moved(root: Path) -> None:
    """Two folders that the code reads by other paths stay where they are."""
    (root / "elsewhere").mkdir()
    (root / "bench").rename(root / "elsewhere" / "bench")
    (root / "bench").mkdir()
    shutil.copy(root / "elsewhere/bench/more.csv", root / "bench/more.csv")
    shutil.copytree(root / "shared", root / "elsewhere" / "shared")


HARMLESS_ROWS = {name: Row(edit) for name, edit in HARMLESS.items()} | {
    "another folder": Row(moved, {"env": "elsewhere/bench/quiz.py:make"}),
    "the order of --env-args": Row(
        options={"--env-args": '{"level": "easy", "table": "table.csv"}'}
    ),
    "another --out": Row(),
    "concurrency": Row(options={"--concurrency": 1}),
    "--sync": Row(options={"--sync": "always"}),
}


def alarm(base: str, candidate: str) -> str:
    """What `toolroll compare` says about how the runs were made; it may refuse them."""
    status, output = toolroll("compare", base, candidate, "--json")
    if status:
        return output
    [compared] = json.loads(output)["comparisons"]
    of = compared["coverage"]
    missing = [
        f"{of[kind]} of {of[f'of_{kind}']} {kind}"
        for kind in ("tasks", "samples")
        if of[kind] != of[f"of_{kind}"]
    ]
    return "\n".join([*compared["settings"], *of["other_data"], *missing])


def edited(bench: Bench, row: Row) -> str:
    """Play the edited benchmark; return the alarm. `continued` is a copy of the first run."""
    base = f"base/{row.env}"
    shutil.copytree(bench.root / base, bench.root / "continued")
    row.edit(bench.root)
    status, output = bench.run(row.env, "new", row.options or {})
    assert status == 0, output
    return alarm(base, "new")


def continued(bench: Bench, row: Row) -> int:
    """Continue the copy of the first run; return the exit status."""
    status, output = bench.run(row.env, "continued", {"--samples": 2} | (row.options or {}))
    assert status in (0, 2), output
    return status


@pytest.mark.slow  # two runs for each of 79 rows
@pytest.mark.parametrize("name", ROWS)
def test_what_could_move_a_reward_is_named_and_not_continued(bench: Bench, name: str) -> None:
    row = ROWS[name]
    assert re.search(row.words, edited(bench, row))
    file = bench.root / "continued" / "episodes.jsonl"
    before = file.read_bytes()
    assert continued(bench, row) == (0 if row.continues else 2)
    assert row.continues or file.read_bytes() == before


@pytest.mark.slow  # two runs for each of 79 rows
@pytest.mark.parametrize("name", HARMLESS_ROWS)
def test_what_cannot_move_a_reward_raises_no_alarm(bench: Bench, name: str) -> None:
    row = HARMLESS_ROWS[name]
    assert edited(bench, row) == ""
    assert continued(bench, row) == 0


# --- the identity of an environment ---------------------------------------------------------------


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
    quiz.write(root)
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


def test_packages_count_by_version_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
