"""The files of a benchmark that reads all that it is made of while it plays, and edits of them."""

import gzip
import importlib
import os
import py_compile
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

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


def packed(root: Path, weight: float) -> None:
    (root / "bench" / "weight.gz").write_bytes(gzip.compress(f"{weight}".encode(), mtime=0))


def keys(root: Path, weight: float) -> None:
    file = root / "bench" / "keys.db"
    file.unlink(missing_ok=True)
    with sqlite3.connect(file) as database:
        database.execute("create table keys (weight real)")
        database.execute("insert into keys values (?)", [weight])
    database.close()


def forget(root: Path) -> None:
    for name, module in list(sys.modules.items()):
        known = vars(module)  # transformers imports what it is asked for
        paths = [known.get("__file__"), *(known.get("__path__") or ())]
        if any(path and path.startswith(str(root)) for path in paths):
            del sys.modules[name]
    importlib.invalidate_caches()


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


def compiled(root: Path) -> None:
    for file in (root / "bench").rglob("*.py"):
        py_compile.compile(str(file))


def touched(root: Path) -> None:
    for file in root.rglob("*"):
        if "base" not in file.relative_to(root).parts:
            os.utime(file, (1e9, 1e9))


TASKS = FILES["bench/tasks.jsonl"].splitlines()
MOVES: dict[str, Edit] = {
    "the grader": replace("bench/quiz.py", "float(right) *", "0.5 * right *"),
    "a constant": replace("bench/quiz.py", "LONGEST = 40", "LONGEST = 4"),
    "the grader's regex": replace("bench/quiz.py", r'r"\d+"', r'r"\d"'),
    "a helper": replace("bench/scoring.py", "1.0", "0.5"),
    "a late helper in a package": replace("bench/lib/rules/strict.py", "strip", "upper"),
    "a plug-in": replace("bench/plugins/easy.py", "forty-two", "It is 42."),
    "a tool's decorator": replace("bench/quiz.py", "@counted\n", ""),
    "a tool's default": replace("bench/quiz.py", "year: int = 2020", "year: int = 2021"),
    "a tool's docstring": replace("bench/quiz.py", "its name", "the name of a city"),
    "a tool's name": replace("bench/quiz.py", "lookup", "look_up"),
    "a parameter's type": replace("bench/quiz.py", "year: int = 2020", "year: str = 2020"),
    "a default read from a file": put("bench/defaults.json", '{"unit": "souls"}'),
    "the system prompt": put("bench/prompts/system.txt", "You are terse."),
    "the user's prompt, a template": put("bench/prompts/user.jinja", "And {{ city }}?"),
    "a task": replace("bench/tasks.jsonl", "big", "medium"),
    "the order of tasks": put("bench/tasks.jsonl", "\n".join(reversed(TASKS))),
    "a task more": put("bench/tasks.jsonl", "\n".join([*TASKS, '{"city": "Rome"}'])),
    "a task less": put("bench/tasks.jsonl", TASKS[0]),
    "answers, read late": replace("bench/data/answers.json", '"42", "unit"', '"41", "unit"'),
    "a CSV file": put("bench/more.csv", "name,weight\na,0.5\n"),
    "a CSV file that --env-args names": put("table.csv", "name,weight\na,0.5\n"),
    "a YAML file": put("bench/limits.yaml", "weight: 0.5\n"),
    "a package's resource": put("bench/lib/words.txt", "0.5"),
    "a file of a folder": put("bench/cases/a.txt", "0.5"),
    "a file more in a folder": put("bench/cases/b.txt", "0.5"),
    "a file that only a file names": put("bench/parts/p.txt", "0.5"),
    "a file with a computed name": put("bench/weight-easy.txt", "0.5"),
    "a database": lambda root: keys(root, 0.5),
    "a program": put("bench/check.sh", "echo 0.5\n"),
    "a file of the folder above": put("shared/weight.txt", "0.5"),
    "a file of the working directory": put("here/weight.txt", "0.5"),
    "a packed file": lambda root: packed(root, 0.5),
    "a package's code, same version": put("site/quizkit/units.py", "ONE = 0.5\n"),
}
"""What could move a reward."""
HARMLESS: dict[str, Edit] = {
    "a comment": replace("bench/quiz.py", "LONGEST = 40", "LONGEST = 40  # characters"),
    "a comment in a helper": replace("bench/scoring.py", "def bonus", "# All.\ndef bonus"),
    "a comment in a late helper": replace(
        "bench/lib/rules/strict.py", "text.strip()", "text.strip()  # the end"
    ),
    "blank lines": replace("bench/quiz.py", "\n\n\n", "\n\n\n\n"),
    "formatting": replace("bench/quiz.py", "[lookup, population],", "[lookup,\n  population,],"),
    "quotes": replace("bench/quiz.py", '"weight"', "'weight'"),
    "the order of keys in a file": replace(
        "bench/data/answers.json", '"count": "42", "unit": 1', '"unit": 1, "count": "42"'
    ),
    "the order of keys in a task": replace(
        "bench/tasks.jsonl", '"city": "Rome", "kind": "big"', '"kind": "big", "city": "Rome"'
    ),
    "a file that nothing reads": put("bench/notes.txt", "Nobody reads this."),
    "a data file that nothing reads": put("bench/data/old.json", "{}"),
    "a module that nothing imports": put("bench/lib/draft.py", "1 / 0\n"),
    "a hidden file in a globbed folder": put("bench/cases/.DS_Store", "x"),
    "a README.md": put("bench/README.md", "# Quiz\n"),
    "compiled modules": compiled,
    "times of files": touched,
}
"""What cannot."""
