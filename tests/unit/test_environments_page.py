"""docs/environments.md: every code block is executed, in the order of the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from support.commands import toolroll

from toolroll.evaluation.environment_check import check
from toolroll.evaluation.judge import JudgeConfig
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.testing import (
    EmbeddedEngine,
    load_embedded_tokenizer,
    load_engine,
    serve_in_thread,
)
from toolroll.testing.policy import script

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def command(line: str, engines: dict[str, str]) -> str:
    """What a line of a `sh` block prints; it must end with 0. `engines`: the URL of each port."""
    for port, url in engines.items():
        line = line.replace(f"http://127.0.0.1:{port}", url)
    words = shlex.split(line.replace("path/to/model", str(desk_model_path())))
    assert words[0] == "toolroll"
    done = toolroll(*words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.stdout


@pytest.mark.slow
def test_every_block_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    said: dict[str, str] = {}
    tokenizer = load_embedded_tokenizer()
    replies = next(json.loads(text) for language, text in BLOCKS if language == "json")
    with (
        serve_in_thread(load_engine(desk_model_path())) as sampling,
        serve_in_thread(EmbeddedEngine(tokenizer, script(replies))) as scripted,
    ):
        engines = {"30000": sampling.url, "30001": scripted.url, "30002": sampling.url}
        for language, text in BLOCKS:
            name = re.match(r"# (\w+\.py)\n", text)
            if language == "python" and name:
                (tmp_path / name[1]).write_text(text)
            elif language == "python":
                exec(compile(text, "docs/environments.md", "exec"), {})
                said[text] = capsys.readouterr().out
            elif language != "json":
                assert language == "sh"
                for line in text.splitlines():
                    if not line.endswith("&"):  # the engines are served above
                        said[line] = command(line, engines)
    assert len(list(read_episodes(tmp_path / "out" / "sums"))) == 3
    assert (tmp_path / "out" / "sums" / "view.html").is_file()
    [episode] = read_episodes(tmp_path / "out" / "sums-scripted")
    assert episode.result.reward == 1.0
    assert "references earn 1.0: 1 of 1" in said["toolroll check-env cart.py:env"]
    assert "4\n" in said.values(), "what the Python block prints"


def test_the_first_file_has_twenty_lines() -> None:
    lines = [line for line in BLOCKS[0][1].splitlines()[1:] if line.strip()]
    assert len(lines) <= 20


def test_the_table_names_every_check() -> None:
    rows = re.findall(
        r"^\| ([a-z0-9., ]+) \|", PAGE.partition("## Before you train")[2], re.MULTILINE
    )
    source = Path(check.__code__.co_filename).read_text(encoding="utf-8")
    assert len(rows) == 7
    assert [name for name in rows[1:] if f'"{name}"' not in source] == []


def test_the_section_of_the_judge_names_its_settings() -> None:
    section = PAGE.partition("## A judge as reward")[2].partition("\n## ")[0]
    named = set(re.findall(r"\w+", section))
    assert JudgeConfig.model_fields.keys() <= named
