"""`toolroll demo`: what its folders record."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import toolroll

from toolroll.cli import demo
from toolroll.cli.display import program
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.rollout.runs.registry import choose_tasks

FOLDERS = ("demo", "demo-held-out")


def _provenance(folder: Path, env: str) -> dict[str, Any]:
    [found] = json.loads((folder / "run.json").read_text())["provenance"][env]
    return dict(found)


def test_a_demo_records_its_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "choose_tasks", lambda *args: choose_tasks(*args)[:1])
    done = toolroll("demo", "--out", tmp_path / "demo", "--samples", 1)
    assert done.exit_code == 0, done.output
    where, _, command = done.stdout.splitlines()[-1].partition("; to view the last: ")
    assert all(f"{name}: " in where or f"{name} and " in where for name in FOLDERS), where
    assert command == f"toolroll view {tmp_path / 'demo'}"
    weights = hashlib.sha256((desk_model_path() / "model.safetensors").read_bytes()).hexdigest()
    for folder in FOLDERS:
        found = _provenance(tmp_path / folder, "desk")
        assert found["policy"] == "desk-1m" and found["weights_sha256"] == weights
        assert found["engine_model_path"] == str(desk_model_path())
        assert found["weight_version"] == "default" and len(found["tokenizer_sha256"]) == 64
    scripted = _provenance(tmp_path / "demo", "bfcl/multi_turn_base")
    assert scripted["policy"] == "reference actions, with a mistake in 30% of the episodes"
    assert scripted["weights_sha256"] is None and scripted["engine_model_path"] == "embedded"


@pytest.mark.parametrize(
    ("started_as", "on_path", "name"),
    [
        (".venv/bin/toolroll", False, ".venv/bin/toolroll"),
        (".venv/bin/toolroll", True, "toolroll"),
        ("cli/__main__.py", False, "toolroll"),
    ],
)
def test_the_command_is_named_as_it_was_started(
    started_as: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, on_path: bool
) -> None:
    if on_path:
        (tmp_path / "toolroll").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", [started_as])
    assert program() == name
