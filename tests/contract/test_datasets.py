"""Other programs open what toolroll writes: datasets, pyarrow, pandas and polars the Parquet
samples, pandas and polars `episodes.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pandas
import pyarrow.dataset
import pytest
from support.commands import toolroll
from support.results import episode, exported, trajectory

from toolroll.evaluation.export.dataset import sample_rows, write_dataset
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.run_directory import RunDirectory


def test_a_row_says_where_its_tokens_are_from() -> None:
    first, fork, _ = sample_rows(exported())
    assert first["weight_versions"] == [
        {"version": "v0", "start": 4, "stop": 7},
        {"version": "v1", "start": 9, "stop": 12},
    ]
    assert json.loads(first["messages"])[1] == {"role": "assistant", "content": "Goodbye."}
    assert (first["prompt_length"], fork["prompt_length"]) == (4, 6)


def test_the_card_says_what_the_data_set_is(tmp_path: Path) -> None:
    provenance = {"pond": {"tokenizer_sha256": "8288"}}
    write_dataset(exported(), tmp_path / "set", provenance=provenance)
    card: Any = huggingface_hub.DatasetCard.load(tmp_path / "set" / "README.md")
    assert card.data.task_categories == ["text-generation"]
    assert "| pond | tiny | 3 | 8288 |" in card.text
    [config] = datasets.get_dataset_config_names(str(tmp_path / "set"))
    assert config == "default"
    assert sorted(file.name for file in (tmp_path / "set").iterdir()) == ["README.md", "data"]


def opened_by_datasets(folder: Path) -> list[dict[str, Any]]:
    cache = str(folder.parents[1] / "cache")
    rows: Any = datasets.load_dataset(str(folder.parent), split="train", cache_dir=cache)
    mask = rows.with_format("numpy")[0]["loss_mask"]
    assert mask.dtype.itemsize >= 4, "sums and `-mask` would wrap"
    return list(rows)


def opened_by_pyarrow(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.dataset.dataset(folder).to_table().to_pylist()
    return rows


def opened_by_pandas(folder: Path) -> list[dict[str, Any]]:
    frame = pandas.read_parquet(folder, dtype_backend="pyarrow")
    rows: list[dict[str, Any]] = pyarrow.Table.from_pandas(frame).to_pylist()
    return rows


def opened_by_polars(folder: Path) -> list[dict[str, Any]]:
    polars = pytest.importorskip("polars")
    rows: list[dict[str, Any]] = polars.read_parquet(folder).to_dicts()
    assert polars.scan_parquet(folder).collect().to_dicts() == rows
    return rows


READERS = [opened_by_datasets, opened_by_pyarrow, opened_by_pandas, opened_by_polars]


@pytest.mark.parametrize("read", READERS)
def test_the_folder_is_opened_by(
    read: Callable[[Path], list[dict[str, Any]]], tmp_path: Path
) -> None:
    assert write_dataset(exported(), tmp_path / "set", rows_of_a_file=2) == 3
    data = tmp_path / "set" / "data"
    names = sorted(file.name for file in data.iterdir())
    assert names == ["train-00000.parquet", "train-00001.parquet"]
    assert read(data) == list(sample_rows(exported()))


def write_run(folder: Path, samples: int) -> None:
    with RunDirectory(folder, "pond", {}) as run:
        for sample in range(samples):
            run.append(episode("t-0", sample))


@pytest.mark.parametrize("program", ["pandas", "polars"])
def test_the_episode_file_is_opened_by(program: str, tmp_path: Path) -> None:
    write_run(tmp_path, samples=2)
    file = tmp_path / "episodes.jsonl"
    if program == "pandas":
        frame: Any = pandas.read_json(file, lines=True)
    else:
        polars = pytest.importorskip("polars")
        frame = polars.read_ndjson(file, infer_schema_length=None)
    assert list(frame["sample"]) == [0, 1]
    assert list(frame["trajectories"][0][0]["input_ids"]) == trajectory().input_ids.tolist()


def test_a_run_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to train on"):
        write_dataset(exported()[2:], tmp_path / "set")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "set").mkdir()
    with pytest.raises(UsageError, match="already exists"):
        write_dataset(exported(), tmp_path / "set")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot create .*file/set: Not a directory"):
        write_dataset(exported(), tmp_path / "file" / "set")


def test_the_command(tmp_path: Path) -> None:
    write_run(tmp_path / "run", samples=4)
    done = toolroll("export", tmp_path / "run", "--out", tmp_path / "set")
    assert "4 training samples; datasets.load_dataset(" in done.stdout
