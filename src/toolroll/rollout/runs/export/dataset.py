"""`write_dataset`: writes training samples as a folder of Parquet files for
`datasets.load_dataset`, `pyarrow.dataset`, pandas and polars.

Invariants:

- The rows come from `sample_rows`, and only the rows of one file are in memory at a time.
- An existing folder is never changed.
- The folder contains only Parquet files, because some readers open every file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.export.samples import sample_rows
from toolroll.rollout.runtime.disk import writing
from toolroll.rollout.types import Episode

ROWS_OF_A_FILE = 2000


def write_dataset(
    episodes: Iterable[Episode], folder: Path, *, rows_of_a_file: int = ROWS_OF_A_FILE
) -> int:
    """Write the samples of `episodes` into the new `folder`. Return the number of samples.

    Raises `UsageError` if pyarrow is missing, if `folder` exists or cannot be created, or if there
    are no samples, because `datasets` cannot read an empty data set.
    """
    parquet, schema, table_of = _arrow()
    if folder.exists():
        raise UsageError(f"{folder} already exists")
    rows: Iterator[dict[str, Any]] = sample_rows(episodes)
    first = next(rows, None)
    if first is None:
        raise UsageError(
            "the run has nothing to train on: no graded episode with tokens that the engine sampled"
        )
    data = folder / "data"
    try:
        data.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot create {folder}: {error.strerror}") from error
    rows = chain([first], rows)
    written: list[Path] = []
    count = 0
    try:
        with writing(folder, "The incomplete folder is removed"):
            while batch := list(islice(rows, rows_of_a_file)):
                written.append(data / f"part-{len(written):05d}.parquet")
                parquet.write_table(table_of(batch, schema=schema), written[-1])
                count += len(batch)
            for number, part in enumerate(written):
                part.rename(data / f"train-{number:05d}-of-{len(written):05d}.parquet")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # it was created here
        raise
    return count


def _arrow() -> tuple[Any, Any, Any]:
    """Return pyarrow's Parquet module, the schema, and a function that converts rows to a table."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UsageError("Parquet needs pyarrow: pip install pyarrow") from error
    text, small, large = pyarrow.string(), pyarrow.int32(), pyarrow.int64()
    span = pyarrow.struct([("version", text), ("start", small), ("stop", small)])
    schema = pyarrow.schema(
        [
            ("env", text),
            ("task_id", text),
            ("task_index", large),
            ("sample", large),
            ("sequence", small),
            ("seed", large),
            ("model", text),
            ("reward", pyarrow.float64()),
            ("status", text),
            ("stop_reason", text),
            ("input_ids", pyarrow.list_(small)),
            ("loss_mask", pyarrow.list_(small)),
            ("logprobs", pyarrow.list_(pyarrow.float32())),
            ("prompt_length", small),
            ("fork_reason", text),
            ("weight_versions", pyarrow.list_(span)),
            ("messages", text),
            ("tools", text),
        ]
    )
    return pyarrow.parquet, schema, pyarrow.Table.from_pylist
