"""`read_rows`: reads the rows of a file or a folder, in the formats of several trainers. Nothing is
unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from toolroll.audit.row import Row, row_of
from toolroll.audit.traces import trace_rows
from toolroll.evaluation.export.dataset import sample_rows
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import FILE_NAME, read_episodes

SUFFIXES = (".jsonl", ".parquet", ".pt")


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows in `path`: a run's folder, or one or all files with one of `SUFFIXES` in it.

    Raise `UsageError` if there are none, or with the place of a row that cannot be read.
    """
    if (path / FILE_NAME).is_file():
        path = path / FILE_NAME
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    if not files:
        raise UsageError(f"{path} has no file with rows ({', '.join(SUFFIXES)})")
    for file in files:
        for place, data in _read(file):
            yield row_of(data, f"{file}, {place}")


def _read(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of `file` with their places."""
    if file.suffix == ".parquet":
        return _numbered(_parquet(file))
    if file.suffix == ".pt":
        return _numbered(_torch(file))
    if file.name == FILE_NAME:
        return _numbered(sample_rows(read_episodes(file)))
    if file.suffix == ".jsonl":
        return _json_lines(file)
    raise UsageError(
        f"{file}: the formats are {', '.join(SUFFIXES)}. Pickles are not read, because they run "
        "code: docs/audit.md has a conversion"
    )


def _numbered(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _json_lines(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"line {number}"
            try:
                data = orjson.loads(line)
            except ValueError as error:
                raise UsageError(f"{file}, {place}: not JSON: {error}") from error
            if not isinstance(data, dict):
                raise UsageError(f"{file}, {place}: not a JSON object")
            if "traces" in data or "nodes" in data:
                yield from trace_rows(data, place)
            else:
                yield place, data


def _parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise UsageError(f"{file}: Parquet needs pyarrow: pip install pyarrow") from error
    try:
        with ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(64):
                yield from batch.to_pylist()
    except ArrowException as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def _torch(file: Path) -> list[Mapping[str, Any]]:
    """Return the samples that slime and miles write with `--save-debug-rollout-data`."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise UsageError(f"{file}: a .pt file needs torch: pip install torch") from error
    from pickle import UnpicklingError

    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError) as error:
        raise UsageError(
            f"{file} cannot be read without running its code (weights_only=True): {error}"
        ) from error
    samples = data.get("samples") if isinstance(data, dict) else None
    if not isinstance(samples, list) or not all(isinstance(one, dict) for one in samples):
        raise UsageError(f"{file} has no list of samples, as --save-debug-rollout-data writes it")
    return samples
