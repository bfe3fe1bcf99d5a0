"""`toolroll tasks`, `envs`, `new-env` and `demo`, as the command line runs them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.commands import toolroll
from support.tau import MINI

from toolroll.agents.environments.tau_bench import INSTALL, TauBenchFactory
from toolroll.cli import demo
from toolroll.cli.display import show_environments
from toolroll.cli.tasks import task_row
from toolroll.environments.bfcl.data import INSTALL as BFCL_INSTALL
from toolroll.environments.desk import DESK
from toolroll.evaluation.environment_identity import environment_identity
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.rollout.runs.registry import choose_tasks
from toolroll.trainers.episodes import task_index


def test_a_line_a_task_to_a_file_or_to_standard_output(tmp_path: Path) -> None:
    out = tmp_path / "new" / "tasks.jsonl"
    done = toolroll("tasks", "desk", "--split", "test", "--out", out)
    assert done.exit_code == 0 and "33 tasks" in done.stdout
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    tasks = DESK.tasks("test")
    assert [row["index"] for row in rows] == list(range(33))
    for row, task in zip(rows, tasks, strict=True):
        metadata = row["metadata"]
        names = {"env": "desk", "split": "test", "task_id": task.id}
        assert {**metadata, **task.data, **names} == metadata
        assert task_index(row["index"]) == task_index(str(row["index"])) == task.index
    assert [path.name for path in out.parent.iterdir()] == ["tasks.jsonl"]
    done = toolroll("tasks", "desk", "--tasks", "3,5-6")
    assert [json.loads(line)["index"] for line in done.stdout.splitlines()] == [3, 5, 6]
    with pytest.raises(UsageError, match="tasks 0 to 32"):
        toolroll("tasks", "desk", "--tasks", "99", "--out", tmp_path / "t.jsonl")
    assert list(tmp_path.iterdir()) == [out.parent]


def test_rows_have_the_published_form_and_whole_paths(here: Path) -> None:
    task = MINI.factory().tasks("train")[4]
    row = task_row("tau-bench/retail", "train", task)
    assert row["index"] == 4
    names = {"user_id", "instruction", "actions", "outputs", "env", "split", "task_id"}
    assert set(row["metadata"]) == names
    # A trainer reads them in another folder
    (here / "mine.py").write_text("from toolroll.environments.desk import DESK\n")
    done = toolroll("tasks", "mine.py:DESK", "--tasks", 0)
    assert json.loads(done.stdout)["metadata"]["env"] == f"{here}/mine.py:DESK"


def test_the_command_that_installs_a_benchmark_is_on_one_line() -> None:
    console, absent = Console(width=60, record=True), []
    for name in ("retail", "airline"):
        absent.append(TauBenchFactory(name, ("test",), "Orders.", package="json"))
    show_environments([DESK, *absent], console)
    lines = console.export_text().splitlines()
    place = lines.index("tau-bench/retail, tau-bench/airline:")
    assert lines[place + 1].strip() == INSTALL
    assert sum(INSTALL in line for line in lines) == 1
    docs = Path(__file__).parents[3] / "docs"
    assert f"\n{INSTALL}\n" in (docs / "tau-bench.md").read_text(encoding="utf-8")
    assert f"`{BFCL_INSTALL}`" in (docs / "runs.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("here")
def test_new_env_says_what_to_do_next() -> None:
    done = toolroll("new-env", "tide-gauge")
    assert done.exit_code == 0
    test = "pip install pytest && python -m pytest test_tide_gauge.py"
    for line in ("toolroll check-env tide_gauge.py:env", test):
        assert f"  {line}\n" in done.stdout
    assert "  toolroll run tide_gauge.py:env --engine" in done.stdout


def test_a_demo_records_its_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "choose_tasks", lambda *args: choose_tasks(*args)[:1])
    done = toolroll("demo", "--out", tmp_path / "demo", "--samples", 1)
    assert done.exit_code == 0, done.output
    where, _, command = done.stdout.splitlines()[-1].partition("; to view the first: ")
    folders = ("demo", "demo-held-out")
    assert all(f"{name}: " in where or f"{name} and " in where for name in folders), where
    assert command == f"toolroll view {tmp_path / 'demo-held-out'}"
    page, notes = tmp_path / "demo" / "view.html", tmp_path / "demo" / "notes.txt"
    page.touch()
    notes.touch()
    with pytest.raises(UsageError, match=r"holds other files \(notes.txt\)"):
        toolroll("demo", "--out", tmp_path / "demo", "--samples", 1)
    assert page.exists() and (tmp_path / "demo" / "episodes.jsonl").exists()
    notes.unlink()
    assert toolroll("demo", "--out", tmp_path / "demo", "--samples", 1).exit_code == 0
    assert not page.exists()

    def recorded(folder: str, env: str, *names: str) -> list[Any]:
        file = json.loads((tmp_path / folder / "run.json").read_text())
        [entry] = file["provenance"][env]
        return [(entry | file["environments"][env])[name] for name in names]

    names = ("policy", "weights_sha256", "engine_model_path", "weight_version")
    weights = hashlib.sha256((desk_model_path() / "model.safetensors").read_bytes()).hexdigest()
    for folder in folders:
        model = ["desk-1m", weights, str(desk_model_path()), "default"]
        assert recorded(folder, "desk", *names) == model
        assert len(recorded(folder, "desk", "tokenizer_sha256")[0]) == 64
        [identity] = recorded(folder, "desk", "environment")  # as `toolroll run` records it
        whole = DESK.tasks("held-out") if "held-out" in folder else DESK.tasks("test")[:1]
        assert identity == environment_identity("desk", DESK, whole)
    scripted = "reference actions, with a mistake in 30% of the episodes"
    assert recorded("demo", "bfcl/multi_turn_base", *names[:3]) == [scripted, None, "embedded"]
