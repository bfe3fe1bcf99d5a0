"""Every code block of README.md and docs/ works: Python is run, commands and settings are read."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import re
import shlex
import shutil
import threading
import tomllib
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

import toolroll
from toolroll import Model, RolloutArgs, RunSettings, Summary
from toolroll.cli.app import app
from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.evaluation.report import report
from toolroll.testing import EmbeddedEngine, echo, load_embedded_tokenizer, script, serve_in_thread
from toolroll.trainers.episodes import EpisodeSettings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: [^>]+ -->\s*$")
COMMANDS: Any = typer.main.get_command(app)


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


def test_every_block_names_its_language() -> None:
    known = {"python", "sh", "text", "yaml", "json", "toml", "jinja"}
    assert [str(block) for block in blocks("")] == []
    languages = {match[2] for page in PAGES for match in FENCE.finditer(page.read_text())}
    assert languages <= known


# --- Python ---------------------------------------------------------------------------------------

REPLIES: dict[str, list[str]] = {}
"""What the pages give to `toolroll engine --script`."""
for block in blocks("json"):
    REPLIES |= json.loads(block.text)


@dataclass
class Addresses:
    """What listens at the two addresses that the pages use."""

    engine: str
    endpoint: str

    def of(self, text: str) -> str:
        text = text.replace("http://127.0.0.1:30000", self.engine)
        return text.replace("http://127.0.0.1:8400", self.endpoint)


@pytest.fixture(scope="module")
def addresses() -> Iterator[Addresses]:
    scripted = script(REPLIES)
    policy = lambda request: (scripted if request.routing_key in REPLIES else echo)(request)
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), policy)) as engine:
        args = RolloutArgs(engine=engine.url, model="embedded", parser="hermes")
        opened = asyncio.new_event_loop()
        stack = AsyncExitStack()

        async def start() -> str:
            model = await stack.enter_async_context(Model.from_args(args))
            settings = EndpointSettings(port=0)
            server = EndpointServer(Endpoint(model, settings))
            return (await stack.enter_async_context(server)).url

        with running(opened):
            url = asyncio.run_coroutine_threadsafe(start(), opened).result()
            yield Addresses(engine.url, url)
            asyncio.run_coroutine_threadsafe(stack.aclose(), opened).result()


@contextmanager
def running(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Run `loop` in a thread while the context is open."""
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def finished(addresses: Addresses, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of one task."""
    out = tmp_path_factory.mktemp("run") / "demo"
    command = f"run desk --engine {addresses.engine} --model embedded --tasks 0 --out {out}"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    return out


PYTHON_PAGES = sorted({block.page for block in blocks("python")})


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(
    page: Path,
    addresses: Addresses,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In order, in one namespace, beside the folder of a finished run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "out" / "demo")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("python"):
        if block.page != page:
            continue
        source = addresses.of(block.text)
        if named := re.match(r"# (\w+\.py)\n", source):
            Path(named[1]).write_text(source)
        code = compile(source, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if block.run:
            made = eval(code, names)  # the project's own pages
            if inspect.iscoroutine(made):
                asyncio.run(made)


def test_the_api_page_names_every_public_name_with_its_home() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    own, _, others = page.partition("## `toolroll`")[2].partition("## Other homes")
    names = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", own, re.MULTILINE)))
    assert sorted(names) == sorted(toolroll.__all__)
    for module, text in re.findall(r"^\| `([\w.]+)` \| (.*)", others, re.MULTILINE):
        home = importlib.import_module(module)
        assert [name for name in re.findall(r"`(\w+)`", text) if not hasattr(home, name)] == []


SOURCES = {str(block): block.text for block in blocks("python")}
SOURCES |= {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "examples").rglob("*.py")
}


def test_docs_and_examples_import_the_public_names_from_toolroll() -> None:
    found = [
        f"{place}: from {module} import {name}"
        for place, source in SOURCES.items()
        for module, names in re.findall(
            r"^ *from toolroll\.([\w.]+) import ([\w, ]+)", source, re.M
        )
        if module not in ("agents.trainable_agents", "parsers")  # the published names
        for name in names.split(", ")
        if name in toolroll.__all__
    ]
    assert found == []


@pytest.mark.parametrize("kind", [RolloutArgs, RunSettings, EpisodeSettings])
def test_the_page_of_settings_has_every_setting(kind: type[BaseModel]) -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    table = page.partition("## Names of others")[0]
    rows = " ".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE))
    assert kind.model_fields.keys() <= set(re.findall(r"`(\w+)`", rows))


def test_the_page_of_results_has_every_key_of_the_summary() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    table = page.partition("## summary.json")[2].partition("\n## ")[0]
    rows = " ".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE))
    assert report(Summary()).keys() == set(re.findall(r"`([^`]+)`", rows))


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    used = [words for _, words in command_lines()]
    assert {words[1] for words in used if words[0] == "make"} <= targets
    asked = re.findall(r'"(?:\.|toolroll)\[([\w,]+)\]', " ".join(map(" ".join, used)))
    assert {extra for extras_of in asked for extra in extras_of.split(",")} <= extras


@pytest.mark.parametrize("block", blocks("yaml", "json", "toml"), ids=str)
def test_settings_can_be_read(block: Block) -> None:
    read = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}[block.language]
    assert read(block.text)  # type: ignore[operator]
