"""`datasets` reads the training samples that toolroll exports as Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.results import episode, exported, trajectory
from typer.testing import CliRunner

from toolroll.rollout.cli.app import app
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.export import write_dataset
from toolroll.rollout.runs.run_directory import RunDirectory


def load(folder: Path, cache: Path) -> Any:
    return datasets.load_dataset(str(folder), split="train", cache_dir=str(cache))


def test_datasets_reads_the_training_samples(tmp_path: Path) -> None:
    assert write_dataset(exported(), tmp_path / "set", rows_of_a_file=2) == 3
    names = sorted(file.name for file in (tmp_path / "set" / "data").iterdir())
    assert names == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    rows = load(tmp_path / "set", tmp_path / "cache")
    assert [(row["task_id"], row["sample"], row["sequence"], row["reward"]) for row in rows] == [
        ("t-0", 0, 0, 1.0),
        ("t-0", 0, 1, 1.0),
        ("t-0", 1, 0, 0.0),
    ]
    first, fork = rows[0], rows[1]
    part = trajectory()
    assert first["input_ids"] == part.input_ids.tolist()
    assert first["loss_mask"] == part.loss_mask.tolist()
    assert first["logprobs"] == [
        None if value != value else value for value in part.logprobs.tolist()
    ]
    assert first["weight_versions"] == [
        {"version": "v0", "start": 4, "stop": 7},
        {"version": "v1", "start": 9, "stop": 12},
    ]
    assert json.loads(first["messages"])[1] == {"role": "assistant", "content": "Goodbye."}
    assert (
        first["prompt_length"],
        first["fork_reason"],
        fork["fork_reason"],
        fork["prompt_length"],
    ) == (4, None, "rewritten", 6)


def test_a_run_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to be trained on"):
        write_dataset(exported()[2:], tmp_path / "set")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "set").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        write_dataset(exported(), tmp_path / "set")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/set cannot be made: Not a directory"):
        write_dataset(exported(), tmp_path / "file" / "set")


def test_the_command(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", "pond", {}) as folder:
        for sample in range(4):
            folder.append(episode("t-0", sample))
    arguments = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "set")]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert "4 training samples; datasets.load_dataset(" in done.stdout
