"""README.md and docs/ say what is true. Every code block works: Python is run, commands and
settings are read."""

import ast
import asyncio
import importlib
import inspect
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel
from support.commands import toolroll as toolroll_command
from support.http import in_thread

import toolroll
from toolroll import Model, RolloutArgs, RunSettings, Summary
from toolroll.cli.app import app
from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.evaluation.environment_check import check
from toolroll.evaluation.report import report
from toolroll.rollout.model.tokenizers import desk_model_path, load_tokenizer
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.settings import ModelSettings
from toolroll.testing import (
    EmbeddedEngine,
    echo,
    load_embedded_tokenizer,
    load_engine,
    script,
    serve_in_thread,
)
from toolroll.trainers.episodes import EpisodeSettings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: [^>]+ -->\s*$")
COMMANDS: Any = typer.main.get_command(app)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GUIDES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def in_first_column(text: str) -> set[str]:
    """The names in the first column of the tables in `text`."""
    cells = " ".join(re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE))
    return set(re.findall(r"`([^`]+)`", cells))


@dataclass(frozen=True)
class Block:
    """A code block of a page, from `line` on. `run` is False after a comment `not run: REASON`."""

    page: Path
    line: int
    language: str
    text: str
    run: bool

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            body = inspect.cleandoc(match[3]) if match[1] else match[3]
            run = NOT_RUN.search(text[: match.start()]) is None
            found.append(Block(page, line, match[2], body, run))
    return [block for block in found if block.language in languages]


# --- Python ---------------------------------------------------------------------------------------

REPLIES: dict[str, list[str]] = {}
"""What the pages give to `toolroll engine --script`."""
for block in blocks("json"):
    REPLIES |= json.loads(block.text)


def with_urls(text: str, urls: dict[str, str]) -> str:
    """`text` with the URL of each port that the pages use."""
    for port, url in urls.items():
        text = text.replace(f"http://127.0.0.1:{port}", url)
    return text


@asynccontextmanager
async def endpoint_over(engine: str) -> AsyncIterator[str]:
    args = RolloutArgs(engine=engine, model="embedded", parser="hermes")
    async with (
        Model.from_args(args) as model,
        EndpointServer(Endpoint(model, EndpointSettings(port=0))) as server,
    ):
        yield server.url


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """The engine and the endpoint of the pages."""
    scripted = script(REPLIES)
    policy = lambda request: (scripted if request.routing_key in REPLIES else echo)(request)
    with (
        serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), policy)) as engine,
        in_thread(endpoint_over(engine.url)) as url,
    ):
        yield {"30000": engine.url, "8400": url}


@pytest.fixture(scope="module")
def finished(urls: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of one task."""
    out = tmp_path_factory.mktemp("run") / "demo"
    command = f"run desk --engine {urls['30000']} --model embedded --tasks 0 --out {out}"
    result = toolroll_command(*command.split())
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize(
    "page", sorted({block.page for block in blocks("python")}), ids=lambda page: page.stem
)
def test_the_python_of_a_page_runs(
    page: Path, urls: dict[str, str], finished: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """In order, in one namespace, beside the folder of a finished run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "out" / "demo-held-out")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("python"):
        if block.page != page:
            continue
        source = with_urls(block.text, urls)
        if named := re.match(r"# (\w+\.py)\n", source):
            Path(named[1]).write_text(source)
        code = compile(source, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if block.run:
            made = eval(code, names)  # the project's own pages
            if inspect.iscoroutine(made):
                asyncio.run(made)


def test_the_api_page_names_every_public_name_with_its_home() -> None:
    page = text_of("docs/api.md").partition("## `toolroll`")[2]
    own, _, others = page.partition("## Other homes")
    assert in_first_column(own) == set(toolroll.__all__)
    for module, text in re.findall(r"^\| `([\w.]+)` \| (.*)", others, re.MULTILINE):
        home = importlib.import_module(module)
        assert [name for name in re.findall(r"`(\w+)`", text) if not hasattr(home, name)] == []


@pytest.mark.parametrize("kind", [RolloutArgs, RunSettings, EpisodeSettings])
def test_the_page_of_settings_has_every_setting(kind: type[BaseModel]) -> None:
    table = text_of("docs/settings.md").partition("## Names of others")[0]
    assert kind.model_fields.keys() <= in_first_column(table)


def test_the_page_of_results_has_every_key_of_the_summary() -> None:
    table = text_of("docs/results.md").partition("## summary.json")[2].partition("\n## ")[0]
    assert report(Summary()).keys() == in_first_column(table)


def keys_in(value: Any, path: str = "") -> Iterator[str]:
    """Each key of the mapping `value` and of the mappings in it, as a path."""
    for name, part in value.items() if isinstance(value, dict) else ():
        yield f"{path}/{name}"
        yield from keys_in(part, f"{path}/{name}")


def test_the_page_of_results_shows_the_inner_keys_of_the_summary() -> None:
    summary = Summary("bfcl")
    for episode in read_episodes(ROOT / "tests" / "unit" / "runs" / "episodes-0.1.jsonl"):
        summary.add(episode)
    counted = "prompt_tokens executed_calls/add_contact invalid_calls/invalid_json"
    summary.totals.update(dict.fromkeys(counted.split(), 1))
    page = text_of("docs/results.md").partition("## summary.json")[2]
    excerpt = page.partition("```text\n")[2].partition("```")[0].replace(", ...", "")
    shown = json.loads(f"{{{','.join(excerpt.splitlines())}}}")
    assert len(shown) == 5 and set(keys_in(shown)) <= set(keys_in(report(summary)))


# --- commands -------------------------------------------------------------------------------------


def command_lines() -> Iterator[tuple[Block, list[str]]]:
    for block in blocks("sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\||;", line.partition(" #")[0]):
                words = shlex.split(part.strip().rstrip("&"))
                while words and re.fullmatch(r"\w+=\S*", words[0]):
                    del words[0]
                if words:
                    yield block, words


@pytest.mark.parametrize(
    ("block", "words"),
    [(block, words) for block, words in command_lines() if words[0] == "toolroll"],
    ids=lambda value: str(value) if isinstance(value, Block) else " ".join(value)[:40],
)
def test_the_options_of_a_command_exist(block: Block, words: list[str]) -> None:
    given = ["desk" if word == "..." else word for word in words[1:]]
    if given == ["--version"]:
        return
    command = COMMANDS.commands[given[0]]
    command.make_context(given[0], given[1:], parent=typer.Context(COMMANDS))


def test_make_targets_and_extras_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(PROJECT["optional-dependencies"])
    used = [words for _, words in command_lines()]
    assert {words[1] for words in used if words[0] == "make"} <= targets
    asked = re.findall(r'"(?:\.|toolroll)\[([\w,]+)\]', " ".join(map(" ".join, used)))
    assert {extra for extras_of in asked for extra in extras_of.split(",")} <= extras


@pytest.mark.parametrize("block", blocks("yaml", "json", "toml"), ids=str)
def test_settings_can_be_read(block: Block) -> None:
    read = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}[block.language]
    assert read(block.text)  # type: ignore[operator]


# --- docs/environments.md -------------------------------------------------------------------------

STEPS = [each for each in blocks("python", "sh", "json") if each.page.stem == "environments"]


def printed(line: str, urls: dict[str, str]) -> str:
    """What a line of a `sh` block prints; it must end with 0."""
    words = shlex.split(with_urls(line, urls).replace("path/to/model", str(desk_model_path())))
    assert words[0] == "toolroll"
    done = toolroll_command(*words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.stdout


@pytest.mark.slow
def test_the_page_of_environments_works(here: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.syspath_prepend(str(here))
    shown: dict[str, str] = {}
    tokenizer = load_embedded_tokenizer()
    replies = next(json.loads(block.text) for block in STEPS if block.language == "json")
    with (
        serve_in_thread(load_engine(desk_model_path())) as sampling,
        serve_in_thread(EmbeddedEngine(tokenizer, script(replies))) as scripted,
    ):
        engines = {"30000": sampling.url, "30001": scripted.url, "30002": sampling.url}
        for block in STEPS:
            name = re.match(r"# (\w+\.py)\n", block.text)
            if block.language == "python" and name:
                Path(name[1]).write_text(block.text)
            elif block.language == "python":
                exec(compile(block.text, str(block), "exec"), {})
                shown[block.text] = capsys.readouterr().out
            elif block.language == "sh":
                for line in block.text.splitlines():
                    if not line.endswith("&"):  # the engines are served above
                        shown[line] = printed(line, engines)
    assert len(list(read_episodes(here / "out" / "sums"))) == 3
    assert (here / "out" / "sums" / "view.html").is_file()
    [episode] = read_episodes(here / "out" / "sums-scripted")
    assert episode.result.reward == 1.0
    assert "references earn 1.0: 1 of 1" in shown["toolroll check-env cart.py:env"]
    assert "4\n" in shown.values(), "what the Python block prints"


def test_the_page_of_environments_names_the_checks() -> None:
    checks = text_of("docs/environments.md").partition("## Before you train")[2]
    rows = re.findall(r"^\| ([a-z0-9., ]+) \|", checks, re.MULTILINE)
    source = Path(check.__code__.co_filename).read_text(encoding="utf-8")
    assert len(rows) == 7
    assert [name for name in rows[1:] if f'"{name}"' not in source] == []


# --- all pages ------------------------------------------------------------------------------------


def test_readme_and_docs_have_no_more_words_than_a_user_needs() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert words[ROOT / "README.md"] <= 700
    assert sum(words.values()) <= 29_000


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_rows_of_a_table_have_its_columns(page: Path) -> None:
    """A bare | inside a cell splits it, in code too."""
    columns = 0
    broken = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        bars = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if columns and bars and bars != columns:
            broken.append(number)
        columns = (columns or bars) if bars else 0
    assert broken == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_paths_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:parsers|rollout|agents|tests|docs|examples|benchmarks)/[\w./-]*)`",
        page.read_text(encoding="utf-8"),
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_limits_that_the_security_page_names_are_settings() -> None:
    limits = text_of("SECURITY.md").partition("Limits, all in `EndpointSettings`:")[2]
    names = re.findall(r"`(\w+)`", limits.partition("Together")[0])
    assert len(names) == 10
    assert set(names) <= set(EndpointSettings.model_fields)


def test_no_tokenizer_runs_code_of_its_folder_unless_asked() -> None:
    """Without the argument, transformers asks on standard input, and runs the code after "y"."""
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in ROOT.glob("src/toolroll/rollout/**/*.py")
    )
    calls = re.findall(r"AutoTokenizer\.from_pretrained\(\s*name, (.*?)\s*\)", text)
    assert calls == ["trust_remote_code=trust_remote_code"]
    assert "trust_remote_code=True" not in text
    assert load_tokenizer.__kwdefaults__ == {"trust_remote_code": False}
    assert ModelSettings.model_fields["trust_remote_code"].default is False


def test_the_files_for_github_can_be_read() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    read = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in files}
    [ruff] = read[".pre-commit-config.yaml"]["repos"]
    assert f"ruff=={ruff['rev'].removeprefix('v')}" in PROJECT["optional-dependencies"]["dev"]
    tested = read["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert [f"Programming Language :: Python :: {version}" for version in tested] == [
        line for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
    ]
