"""What the README shows is what happens."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from toolroll.endpoint import EndpointSettings
from toolroll.rollout.model.tokenizers import load_tokenizer
from toolroll.rollout.settings import ModelSettings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted((ROOT / "docs").rglob("*.md"))


def test_it_is_short() -> None:
    assert len(README.split()) <= 700


def test_readme_and_docs_have_no_more_words_than_a_user_needs() -> None:
    words = [len(page.read_text(encoding="utf-8").split()) for page in DOCS]
    assert sum(words) + len(README.split()) <= 29_000


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_paths_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:parsers|rollout|agents|tests|docs|examples|benchmarks)/[\w./-]*)`", text
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_limits_that_the_security_page_names_are_settings() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    limits = re.findall(
        r"`(\w+)`", text.partition("Limits, all in `EndpointSettings`:")[2].partition("Together")[0]
    )
    assert len(limits) == 10
    assert set(limits) <= set(EndpointSettings.model_fields)


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [ruff] = read[".pre-commit-config.yaml"]["repos"]
    assert f"ruff=={ruff['rev'].removeprefix('v')}" in project["optional-dependencies"]["dev"]
    tested = read["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert [f"Programming Language :: Python :: {version}" for version in tested] == [
        line for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)
    ]
