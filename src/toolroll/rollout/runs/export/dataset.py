"""`write_dataset`: writes training samples as a folder of Parquet files for
`datasets.load_dataset`, `pyarrow.dataset`, pandas and polars.

Invariants:

- There is one row per training sequence, and only the rows of one file are in memory at a time.
- Aborted episodes are left out, and so are sequences without a trained token and sequences that no
  engine sampled, such as those of a baseline.
- `loss_mask` and `logprobs` have one value for each token of `input_ids`. The logprobs of tokens
  that were not sampled are null.
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
from toolroll.rollout.runtime.disk import writing
from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.session.trajectory_json import to_json
from toolroll.rollout.types import Episode, Status, Trajectory

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


_TAKEN = ("input_ids", "loss_mask", "logprobs", "prompt_length", "fork_reason")


def sample_rows(episodes: Iterable[Episode]) -> Iterator[dict[str, Any]]:
    """Yield one row of plain values per sequence. `messages` and `tools` are JSON text, because a
    column of a Parquet file has one type, but their structure differs between episodes.
    """
    for episode in episodes:
        result = episode.result
        if result.reward is None or result.status is Status.ABORTED:
            continue
        for number, part in enumerate(result.trajectories):
            if part.source == "engine" and part.trained_tokens:
                yield _row(episode, number, part)


def _row(episode: Episode, number: int, part: Trajectory) -> dict[str, Any]:
    result, values = episode.result, to_json(part)
    return {
        "env": episode.env,
        "task_id": episode.task_id,
        "task_index": episode.task_index,
        "sample": episode.sample,
        "sequence": number,
        "seed": episode.seed,
        "model": episode.model,
        "reward": result.reward,
        "status": result.status.value,
        "stop_reason": str(result.stop_reason),
        **{name: values[name] for name in _TAKEN},
        "weight_versions": [
            {"version": span.version, "start": span.start, "stop": span.stop}
            for span in part.weight_versions
        ],
        "messages": json_bytes(result.messages).decode(),
        "tools": json_bytes(result.tools).decode(),
    }
