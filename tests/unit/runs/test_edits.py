"""Edits between two runs: what could move a reward is refused or named by `toolroll compare`, and
the first run is not continued; what cannot move one raises no alarm.

The benchmark below reads all that it is made of while it plays. A row of `MOVES` or `HARMLESS` is
one edit of its files, or one more option of the second run.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import py_compile
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import commands

from toolroll import UsageError
from toolroll.testing import (
    EmbeddedEngine,
    PolicyRequest,
    load_embedded_tokenizer,
    serve_in_thread,
)

pytestmark = pytest.mark.slow  # two runs for each of 158 rows

# --- the benchmark --------------------------------------------------------------------------------

QUIZ = '''\
import csv
import functools
import gzip
import importlib
import json
import re
import sqlite3
import subprocess
from importlib.resources import files
from pathlib import Path

import jinja2
import quizkit
import yaml
from scoring import bonus

from toolroll import tool_environment

HERE = Path(__file__).parent
NUMBER = re.compile(r"\\d+")
LONGEST = 40
DEFAULTS = json.loads((HERE / "defaults.json").read_text())
SYSTEM = (HERE / "prompts" / "system.txt").read_text()
PROMPTS = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE / "prompts"))


def counted(tool):
    @functools.wraps(tool)
    def call(*args, **kwargs):
        return f"{tool(*args, **kwargs)} (1 of 1)"

    return call


@counted
def lookup(city: str, year: int = 2020) -> str:
    """Look up how many people live in a city.

    Args:
        city: its name
        year: the year of the count
    """
    return "42 people" if year == 2020 else "41 people"


def population(city: str, unit: str = DEFAULTS["unit"]) -> str:
    """Look up a population in a unit."""
    return unit


def solved(task, final, aliases):
    from lib.rules.strict import normalize

    answers = json.loads((HERE / "data" / "answers.json").read_text())
    found = NUMBER.findall(normalize(final))
    wanted = answers[task["city"]]
    return len(final) < LONGEST and (wanted["count"] in found or final in aliases)


def weights(level, *tables):
    yield float((HERE / f"weight-{level}.txt").read_text())
    for table in tables:
        with open(table) as file:
            yield from (float(row["weight"]) for row in csv.DictReader(file))
    yield yaml.safe_load((HERE / "limits.yaml").read_text())["weight"]
    yield float(files("lib").joinpath("words.txt").read_text())
    for case in sorted(HERE.glob("cases/*.txt")):
        yield float(case.read_text())
    for part in json.loads((HERE / "manifest.json").read_text()):
        yield float((HERE / part).read_text())
    with sqlite3.connect(HERE / "keys.db") as keys:
        yield from (float(weight) for (weight,) in keys.execute("select weight from keys"))
    yield float(subprocess.check_output(["sh", str(HERE / "check.sh")]))
    yield float((HERE.parent / "shared" / "weight.txt").read_text())
    yield float(Path("here/weight.txt").read_text())
    with gzip.open(HERE / "weight.gz", "rt") as packed:
        yield float(packed.read())
    yield quizkit.weight()


def make(table, level, more="bench/more.csv"):
    late = importlib.import_module("plugins." + level)
    tasks = [json.loads(line) for line in (HERE / "tasks.jsonl").read_text().splitlines()]
    for task in tasks:
        task["prompt"] = PROMPTS.get_template("user.jinja").render(task)

    def reward(task, final):
        right = solved(task, final, late.aliases())
        return float(right) * bonus() * min(1.0, *weights(level, table, more))

    return tool_environment(
        tools=[lookup, population], tasks=tasks, reward=reward, system=SYSTEM
    )
'''

JUDGED = '''\
import json
from pathlib import Path

from toolroll import tool_environment
from toolroll.evaluation.judge import Judge

HERE = Path(__file__).parent
MODEL = "judge-8b"


def lookup(city: str) -> str:
    """Look up how many people live in a city."""
    return "42 people"


def make(url):
    settings = json.loads((HERE / "judge.json").read_text())
    judge = Judge((HERE / "rubric.txt").read_text(), base_url=url, model=MODEL, **settings)
    return tool_environment(
        tools=[lookup], tasks=[{"prompt": "How many people live in Rome?"}], judge=judge
    )
'''

ASKED = '''\
from pathlib import Path

from toolroll import Environment, Observation, StepResult

PERSONA = Path(__file__).with_name("persona.txt")


class Asked(Environment):
    """A user wants to know a number."""

    tasks = [{"id": "rome", "city": "Rome"}]

    def __init__(self, options):
        self.options = options

    async def reset(self, task, seed):
        self.user = self.options.user(seed)
        persona = PERSONA.read_text().format(task.data["city"])
        return Observation([{"role": "user", "content": await self.user.reset(persona)}])

    async def step(self, action):
        said = await self.user.step(action.content)
        return StepResult([{"role": "user", "content": said}], reward=1.0, done=True)

    async def close(self):
        await self.user.close()
'''

FILES = {
    "bench/quiz.py": QUIZ,
    "bench/judged.py": JUDGED,
    "bench/asked.py": ASKED,
    "bench/scoring.py": "def bonus():\n    return 1.0\n",
    "bench/lib/__init__.py": "",
    "bench/lib/rules/__init__.py": "",
    "bench/lib/rules/strict.py": "def normalize(text):\n    return text.strip()\n",
    "bench/lib/words.txt": "1",
    "bench/plugins/easy.py": "def aliases():\n    return ['forty-two']\n",
    "bench/plugins/hard.py": "def aliases():\n    return []\n",
    "bench/defaults.json": '{"unit": "people"}',
    "bench/prompts/system.txt": "You answer questions about cities.",
    "bench/prompts/user.jinja": "How many people live in {{ city }}?",
    "bench/tasks.jsonl": '{"city": "Rome", "kind": "big"}\n{"city": "Bern", "kind": "small"}\n',
    "bench/data/answers.json": '{"Rome": {"count": "42", "unit": 1}, "Bern": {"count": "42"}}',
    "bench/more.csv": "name,weight\na,1\n",
    "table.csv": "name,weight\na,1\n",
    "bench/limits.yaml": "weight: 1\n",
    "bench/cases/a.txt": "1",
    "bench/manifest.json": '["parts/p.txt"]',
    "bench/parts/p.txt": "1",
    "bench/weight-easy.txt": "1",
    "bench/weight-hard.txt": "1",
    "bench/check.sh": "echo 1\n",
    "bench/judge.json": '{"temperature": 0.0}',
    "bench/rubric.txt": "1 if it is right, else 0.",
    "bench/persona.txt": "You want to know how many people live in {}.",
    "shared/weight.txt": "1",
    "here/weight.txt": "1",
    "site/quizkit/__init__.py": "def weight():\n    from quizkit import units\n\n"
    "    return units.ONE\n",
    "site/quizkit/units.py": "ONE = 1.0\n",
    "site/quizkit-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: quizkit\nVersion: 1.0\n",
    "site/quizkit-1.0.dist-info/RECORD": "quizkit/__init__.py,,\nquizkit/units.py,,\n"
    "quizkit-1.0.dist-info/METADATA,,\nquizkit-1.0.dist-info/RECORD,,\n",
    "site/quizkit-1.0.dist-info/top_level.txt": "quizkit\n",
}


def write(root: Path) -> None:
    for name, text in FILES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    packed(root, 1)
    keys(root, 1)
    load_embedded_tokenizer().save_pretrained(root / "model")


def packed(root: Path, weight: float) -> None:
    (root / "bench" / "weight.gz").write_bytes(gzip.compress(f"{weight}".encode(), mtime=0))


def keys(root: Path, weight: float) -> None:
    file = root / "bench" / "keys.db"
    file.unlink(missing_ok=True)
    with sqlite3.connect(file) as made:
        made.execute("create table keys (weight real)")
        made.execute("insert into keys values (?)", [weight])
    made.close()


# --- a run ----------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit status."""

    status: int
    text: str


def toolroll(*arguments: object) -> Said:
    """A command; `main` prints an error and exits with 2."""
    try:
        result = commands.toolroll(*arguments)
    except UsageError as error:
        return Said(2, str(error))
    return Said(result.exit_code, result.output)


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

    def run(self, env: str, out: str, changed: dict[str, Any]) -> Said:
        """As in a process of its own: modules of the files are imported again."""
        options = self.options(env) | changed
        words = [options.pop("env")]
        for name, value in ({"--out": out} | options).items():
            words += [name] if value is True else [name, str(value)]
        forget(self.root)
        return toolroll("run", *words)


def forget(root: Path) -> None:
    for name, module in list(sys.modules.items()):
        known = vars(module)  # transformers imports what it is asked for
        paths = [known.get("__file__"), *(known.get("__path__") or ())]
        if any(path and path.startswith(str(root)) for path in paths):
            del sys.modules[name]
    importlib.invalidate_caches()


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
            result = bench.run(env, f"base/{env}", {})
            assert result.status == 0, result.text
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


# --- edits ----------------------------------------------------------------------------------------

Edit = Callable[[Path], None]


def replace(name: str, old: str, new: str) -> Edit:
    def edit(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))

    return edit


def put(name: str, text: str) -> Edit:
    def edit(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    return edit


def new_version(root: Path) -> None:
    """The package's metadata say 1.1; its modules are the same."""
    for file in (root / "site" / "quizkit-1.0.dist-info").iterdir():
        file.write_text(file.read_text().replace("1.0", "1.1"))
    (root / "site" / "quizkit-1.0.dist-info").rename(root / "site" / "quizkit-1.1.dist-info")


def nothing(root: Path) -> None:
    """An option of the run differs instead."""


@dataclass(frozen=True)
class Row:
    """An edit, the options that differ, the words of which `compare` must say one, and whether the
    first run may be continued (`docs/reliability.md`).
    """

    edit: Edit = nothing
    options: dict[str, Any] | None = None
    env: str = "quiz.py:make"
    words: str = "benchmark|tasks"
    continues: bool = False


def option(name: str, value: object, words: str = "", **more: Any) -> Row:
    spoken = name.removeprefix("--").replace("-", "[-_ ]")
    return Row(options={name: value}, words=words or spoken, **more)


MOVES = {
    "the grader": Row(replace("bench/quiz.py", "float(right) *", "0.5 * right *")),
    "a constant": Row(replace("bench/quiz.py", "LONGEST = 40", "LONGEST = 4")),
    "the grader's regex": Row(replace("bench/quiz.py", r'r"\d+"', r'r"\d"')),
    "a helper": Row(replace("bench/scoring.py", "1.0", "0.5")),
    "a helper in a package, imported late": Row(
        replace("bench/lib/rules/strict.py", "strip", "upper")
    ),
    "a plug-in": Row(replace("bench/plugins/easy.py", "forty-two", "It is 42.")),
    "a tool's decorator": Row(replace("bench/quiz.py", "@counted\n", "")),
    "a tool's default": Row(replace("bench/quiz.py", "year: int = 2020", "year: int = 2021")),
    "a tool's docstring": Row(replace("bench/quiz.py", "its name", "the name of a city")),
    "a tool's name": Row(replace("bench/quiz.py", "lookup", "look_up")),
    "a parameter's type": Row(replace("bench/quiz.py", "year: int = 2020", "year: str = 2020")),
    "a default read from a file": Row(put("bench/defaults.json", '{"unit": "souls"}')),
    "the system prompt": Row(put("bench/prompts/system.txt", "You are terse.")),
    "the user's prompt, a template": Row(
        put("bench/prompts/user.jinja", "Population of {{ city }}?")
    ),
    "a task": Row(replace("bench/tasks.jsonl", "big", "medium")),
    "the order of tasks": Row(
        put("bench/tasks.jsonl", "\n".join(reversed(FILES["bench/tasks.jsonl"].splitlines())))
    ),
    "a task more": Row(put("bench/tasks.jsonl", FILES["bench/tasks.jsonl"] + '{"city": "Rome"}\n')),
    "a task less": Row(put("bench/tasks.jsonl", FILES["bench/tasks.jsonl"].splitlines()[0])),
    "answers, read late": Row(replace("bench/data/answers.json", '"42", "unit"', '"41", "unit"')),
    "a CSV file": Row(put("bench/more.csv", "name,weight\na,0.5\n")),
    "a CSV file that --env-args names": Row(put("table.csv", "name,weight\na,0.5\n")),
    "a YAML file": Row(put("bench/limits.yaml", "weight: 0.5\n")),
    "a package's resource": Row(put("bench/lib/words.txt", "0.5")),
    "a file of a folder": Row(put("bench/cases/a.txt", "0.5")),
    "a file more in a folder": Row(put("bench/cases/b.txt", "0.5")),
    "a file that only a file names": Row(put("bench/parts/p.txt", "0.5")),
    "a file with a computed name": Row(put("bench/weight-easy.txt", "0.5")),
    "a database": Row(lambda root: keys(root, 0.5)),
    "a program": Row(put("bench/check.sh", "echo 0.5\n")),
    "a file of the folder above": Row(put("shared/weight.txt", "0.5")),
    "a file of the working directory": Row(put("here/weight.txt", "0.5")),
    "a packed file": Row(lambda root: packed(root, 0.5)),
    "a package's version": Row(new_version, words="packages"),
    "a package's code, same version": Row(put("site/quizkit/units.py", "ONE = 0.5\n")),
    "--env-args": Row(options={"--env-args": '{"table": "table.csv", "level": "hard"}'}),
    "the judge's rubric": Row(put("bench/rubric.txt", "Always 1."), env="judged.py:make"),
    "the judge's model": Row(
        replace("bench/judged.py", "judge-8b", "judge-9b"), env="judged.py:make"
    ),
    "the judge's settings": Row(
        put("bench/judge.json", '{"temperature": 1.0}'), env="judged.py:make"
    ),
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


def compiled(root: Path) -> None:
    for file in (root / "bench").rglob("*.py"):
        py_compile.compile(str(file))


def touched(root: Path) -> None:
    for file in root.rglob("*"):
        if "base" not in file.relative_to(root).parts:
            os.utime(file, (1e9, 1e9))


HARMLESS = {
    "a comment": Row(replace("bench/quiz.py", "LONGEST = 40", "LONGEST = 40  # characters")),
    "a comment in a helper": Row(
        put("bench/scoring.py", "# Of all.\n" + FILES["bench/scoring.py"])
    ),
    "a comment in a late helper": Row(
        put("bench/lib/rules/strict.py", FILES["bench/lib/rules/strict.py"] + "# The end.\n")
    ),
    "blank lines": Row(replace("bench/quiz.py", "\n\n\n", "\n\n\n\n")),
    "formatting": Row(
        replace(
            "bench/quiz.py",
            "[lookup, population], tasks=tasks,",
            "[\n            lookup,\n            population,\n        ], tasks = tasks,",
        )
    ),
    "quotes": Row(replace("bench/quiz.py", '"weight"', "'weight'")),
    "another folder": Row(moved, {"env": "elsewhere/bench/quiz.py:make"}),
    "the order of keys in a file": Row(
        replace("bench/data/answers.json", '"count": "42", "unit": 1', '"unit": 1, "count": "42"')
    ),
    "the order of --env-args": Row(
        options={"--env-args": '{"level": "easy", "table": "table.csv"}'}
    ),
    "the order of keys in a task": Row(
        replace(
            "bench/tasks.jsonl", '"city": "Rome", "kind": "big"', '"kind": "big", "city": "Rome"'
        )
    ),
    "a file that nothing reads": Row(put("bench/notes.txt", "Nobody reads this.")),
    "a data file that nothing reads": Row(put("bench/data/old.json", "{}")),
    "a module that nothing imports": Row(put("bench/lib/draft.py", "1 / 0\n")),
    "a hidden file in a globbed folder": Row(put("bench/cases/.DS_Store", "x")),
    "a README.md": Row(put("bench/README.md", "# Quiz\n")),
    "compiled modules": Row(compiled),
    "times of files": Row(touched),
    "another --out": Row(),
    "concurrency": Row(options={"--concurrency": 1}),
    "--sync": Row(options={"--sync": "always"}),
}


def alarm(base: str, candidate: str) -> str:
    """What `toolroll compare` says about how the runs were made; it may refuse them."""
    compared = toolroll("compare", base, candidate, "--json")
    if compared.status:
        return compared.text
    [found] = json.loads(compared.text)["comparisons"]
    of = found["coverage"]
    missing = [
        f"{of[kind]} of {of[all_of]} {kind}"
        for kind, all_of in (("tasks", "of_tasks"), ("samples", "of_samples"))
        if of[kind] != of[all_of]
    ]
    return "\n".join([*found["settings"], *of["other_data"], *missing])


@pytest.mark.parametrize("name", MOVES)
def test_what_could_move_a_reward_is_refused_or_named(bench: Bench, name: str) -> None:
    row = MOVES[name]
    row.edit(bench.root)
    played = bench.run(row.env, "new", row.options or {})
    assert played.status == 0, played.text
    assert re.search(row.words, alarm(f"base/{row.env}", "new"))


@pytest.mark.parametrize("name", MOVES)
def test_what_could_move_a_reward_is_not_continued(bench: Bench, name: str) -> None:
    row = MOVES[name]
    shutil.copytree(bench.root / "base" / row.env, bench.root / "new")
    row.edit(bench.root)
    before = (bench.root / "new" / "episodes.jsonl").read_bytes()
    continued = bench.run(row.env, "new", {"--samples": 2} | (row.options or {}))
    if row.continues:
        assert continued.status == 0, continued.text
    else:
        assert continued.status == 2, continued.text
        assert (bench.root / "new" / "episodes.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", HARMLESS)
def test_what_cannot_move_a_reward_raises_no_alarm(bench: Bench, name: str) -> None:
    row = HARMLESS[name]
    row.edit(bench.root)
    played = bench.run(row.env, "new", row.options or {})
    assert played.status == 0, played.text
    assert alarm(f"base/{row.env}", "new") == ""


@pytest.mark.parametrize("name", HARMLESS)
def test_what_cannot_move_a_reward_is_continued(bench: Bench, name: str) -> None:
    row = HARMLESS[name]
    shutil.copytree(bench.root / "base" / row.env, bench.root / "new")
    row.edit(bench.root)
    continued = bench.run(row.env, "new", {"--samples": 2} | (row.options or {}))
    assert continued.status == 0, continued.text
