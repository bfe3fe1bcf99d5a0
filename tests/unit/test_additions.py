"""What is added is registered and documented, and a test names it. CONTRIBUTING.md says where each
belongs. `scripts/newest.py` sees each pin, and the tests that need it."""

import importlib
import inspect
import pkgutil
import re
import tomllib
from functools import cache
from itertools import product
from typing import Any

import newest
import pytest
from benchmarks.__main__ import PARTS
from support.source import ROOT, library, own_imports
from typer.main import get_command
from typer.testing import CliRunner
from unit.adapters.test_same_episodes import ADAPTERS

from toolroll.cli.app import app
from toolroll.parsers import formats
from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.registry import environment_names
from toolroll.trainers.frameworks import FRAMEWORKS, SUPPORT

PACKAGES = {one.path.split(".")[2] for one in FRAMEWORKS}
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
ENVIRONMENTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "entry-points"
]["toolroll.environments"]


@cache
def all_tests() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def test_the_command_and_the_table_name_what_exists() -> None:
    printed = CliRunner().invoke(app, ["frameworks"], env={"COLUMNS": "200"}).stdout
    table = (ROOT / "docs" / "trainers.md").read_text()
    for one in FRAMEWORKS:
        module, _, name = one.path.rpartition(".")
        try:
            assert getattr(importlib.import_module(module), name) is not None
        except UsageError as error:  # Atropos' is a subclass of atroposlib's own class
            assert "pip install atroposlib" in str(error)
        assert f"{one.name} {one.version}" in printed
        assert one.path in printed
        cells = one.name, one.version, one.path, one.forks, one.aborted, one.interrupted
        assert f"| {' | '.join(cells)} |" in table.replace("`", "")
        assert f"| {one.name} | {' | '.join(one.support[:-1])} |" in table.replace("`", "")
        for what, answer in zip(SUPPORT, one.support, strict=True):
            assert f"{what}: {answer}" in printed


def test_the_commands_of_the_table_select_tests() -> None:
    contract = (ROOT / "tests" / "contract").glob("test_*.py")
    names = [path.stem for path in contract] + re.findall(r"def (test_\w+)", all_tests())
    for one in FRAMEWORKS:
        (word,) = re.findall(r"-k (\w+)", one.support[-1])
        assert any(word in name for name in names), one.support[-1]


def test_every_adapter_is_listed_and_plays_the_same_episodes() -> None:
    """A new adapter needs a case in `ADAPTERS` of tests/unit/adapters/test_same_episodes.py."""
    folders = (ROOT / "src" / "toolroll" / "trainers").glob("*/__init__.py")
    assert {path.parent.name for path in folders} == PACKAGES == set(ADAPTERS)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_is_installed_documented_and_tested(name: str) -> None:
    assert name in environment_names(), "install the package again: pip install -e ."
    assert name in documented_environments(), f"docs/runs.md has no row for {name}"
    assert ENVIRONMENTS[name].split(":")[0] in all_tests()


def documented_environments() -> set[str]:
    """The names in the first column of the tables in docs/runs.md, such as `a/{b,c}`."""
    names: set[str] = set()
    for cell in re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "runs.md").read_text(), re.MULTILINE):
        parts = [part.split(",") for part in re.split(r"[{}]", cell)]
        names |= {"".join(chosen) for chosen in product(*parts)}
    return names


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_an_example_and_a_test(name: str) -> None:
    help_text = inspect.getdoc(COMMANDS[name].callback) or ""
    assert f"Example: toolroll {name}" in help_text
    assert f'"{name}"' in all_tests()


def test_every_format_is_registered() -> None:
    for module in pkgutil.iter_modules(formats.__path__, f"{formats.__name__}."):
        if not module.name.endswith(".sglang_parser"):  # it has no name of its own
            importlib.import_module(module.name)
    assert unregistered(ToolCallParser) == []


def unregistered(kind: type[Any]) -> list[str]:
    """The subclasses with a name, in the package's own formats, that are not registered."""
    found = []
    for child in kind.__subclasses__():
        found += unregistered(child)
        own = child.__module__.startswith(formats.__name__)
        if own and "name" in vars(child) and child not in built_in_parsers():
            found.append(child.__qualname__)
    return found


def test_every_module_is_imported_or_documented() -> None:
    """A new module that nothing imports, registers or documents was forgotten."""
    modules = library()
    imported = set().union(*own_imports(modules).values())
    texts = [*(ROOT / "docs").rglob("*.md"), ROOT / "pyproject.toml"]
    texts += (ROOT / "src" / "toolroll_verifiers").glob("*.py")
    named = "\n".join(path.read_text() for path in texts)
    assert [
        name
        for name, module in modules.items()
        if name not in imported
        and module.path.name not in {"__init__.py", "__main__.py"}
        and not re.search(rf"\b{re.escape(name)}\b", named)
    ] == []


def test_every_speed_benchmark_is_a_part_that_the_page_describes() -> None:
    found = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if "\ndef run(*, quick: bool" in path.read_text()
    }
    assert found == set(PARTS)
    page = (ROOT / "docs" / "speed.md").read_text()
    section = page.split("\n## The parts\n")[1].split("\n## ")[0]
    assert [part for part in PARTS if f"`{part}`" not in section] == []


def test_every_step_of_the_drawings_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^ *((?:agents|rollout|parsers)/\S+) +(\w+)", page, re.MULTILINE)
    assert len(steps) > 20
    for path, function in steps:
        text = (ROOT / "src" / "toolroll" / path).read_text()
        assert re.search(rf"^ *(async )?def {function}\(", text, re.MULTILINE), (path, function)


@pytest.mark.parametrize("inside", ["rollout", "endpoint"])
def test_every_room_is_on_the_map(inside: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "toolroll" / inside.replace(".", "/")
    rooms = sorted(path.parent.name for path in package.glob("*/__init__.py"))
    assert rooms
    assert [room for room in rooms if f"| `{room}/` |" not in page] == []


def test_the_pins_of_all_files_are_found() -> None:
    found = {(pin.kind, pin.name) for pin in newest.pins()}
    assert {
        ("pip", "areal"),  # tests/requirements-all-no-deps.txt
        ("pip", "strands-sglang"),  # benchmarks/requirements-peers.txt
        ("pip", "skyrl"), ("pip", "bfcl-eval"), ("pip", "lm-eval"), ("pip", "harbor"),  # Makefile
        ("git", "https://github.com/THUDM/slime"),
        ("pip", "pydantic-ai-slim"), ("npm", "ai"), ("npm", "@openai/codex"),  # clients
    } <= found  # fmt: skip
    assert not {name for _, name in found} & {"torch", "transformers"}


def test_a_packages_tests_are_found_through_support_files() -> None:
    names = {path.name for path in newest.tests_of("trl")}
    assert {"test_qwen.py", "test_conformance.py"} <= names and "test_call_policy.py" not in names
    assert newest.tests_of("no-such-package") == []
