"""`run.json` with wrong types: each command says in one line what is wrong, and where."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command, toolroll

from toolroll.rollout.errors import UsageError
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer, serve_in_thread

WRONG: dict[tuple[Any, ...], Any] = {
    (): [],
    ("environments",): [],
    ("environments", "desk"): [7],
    ("environments", "desk", "model"): [],
    ("environments", "desk", "env_args"): [7],
    ("environments", "desk", "agent_args"): "text",
    ("environments", "desk", "split"): {},
    ("provenance",): True,
    ("provenance", "desk"): 7,
    ("provenance", "desk", 0): [],
    ("provenance", "desk", 0, "date"): None,
    ("provenance", "desk", 0, "options"): [["env", "desk"]],
    ("running",): {"desk": -1},
}
"""Values of wrong types, by their place."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "run"
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer())) as engine:
        options = ["--tasks", 0, "--no-do-nothing", "--out", out, "--max-turns", 1]
        toolroll(*run_command(engine.url, *options))
    return out


def changed(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The record with `value` at `path`."""
    if not path:
        return value
    record = copy.deepcopy(record)
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return record


COMMANDS = {
    "view": ("view", "RUN"),
    "atif": ("export", "RUN", "--format", "atif", "--out", "OUT"),
    "parquet": ("export", "RUN", "--out", "OUT"),
    "compare": ("compare", "RUN", "BASE", "--page", "PAGE"),
    "regrade": ("regrade", "RUN", "--out", "OUT"),
    "run": ("run", "--from", "RUN", "--out", "OUT", "--engine", "ftp://nothing"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_record_is_refused_in_a_line(recorded: Path, tmp_path: Path, command: str) -> None:
    record = json.loads((recorded / "run.json").read_text())
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    names = {"RUN": run, "OUT": tmp_path / "out", "BASE": recorded, "PAGE": tmp_path / "page.html"}
    words = [names.get(word, word) for word in COMMANDS[command]]
    for path, value in WRONG.items():
        (run / "run.json").write_text(json.dumps(changed(record, path, value)))
        with pytest.raises(UsageError, match=r"run.json cannot be read \(.*\): repair it") as error:
            toolroll(*words)
        assert "\n" not in str(error.value)
