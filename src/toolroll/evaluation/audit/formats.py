"""`read_rows`: reads the rows of a file or a folder, in the formats of several trainers. Nothing is
unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import orjson

from toolroll.evaluation.audit.row import Row, row_of
from toolroll.evaluation.export.dataset import sample_rows
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import FILE_NAME, read_episodes
from toolroll.rollout.types import Message

_Rows = Iterator[Mapping[str, Any]]
_UNREADABLE = AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows in `path`: a run's folder, or a file or all files of a folder that end with
    .parquet, .jsonl or .pt.

    Raise `UsageError` if there are none, or with the place of a row that cannot be read.
    """
    if not path.exists():
        raise UsageError(f"no such file or folder: {path}")
    path = path / FILE_NAME if (path / FILE_NAME).is_file() else path
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    total = 0
    for file in (file for file in files if file.suffix in _READERS):
        number = 0
        try:
            for number, data in enumerate(_READERS[file.suffix](file), 1):
                yield row_of(data, f"{file}, row {number}")
        except orjson.JSONDecodeError as error:
            raise UsageError(f"{file}, row {number + 1} is not JSON: {error}") from error
        except (*_UNREADABLE, UnpicklingError) as error:
            raise UsageError(
                f"{file} cannot be read after row {number}: {error!r}. Parquet needs pyarrow, .pt "
                "torch. A row is a JSON object, a trace of verifiers or one of slime's samples"
            ) from error
        total += number
    if not total:
        reason = f"the formats are {', '.join(_READERS)}"
        if path.name == FILE_NAME:
            reason = "its episodes were aborted, or have no reward"
        raise UsageError(f"{path} has no rows: {reason}")


def _json_lines(file: Path) -> _Rows:
    if file.name == FILE_NAME:
        yield from sample_rows(read_episodes(file))
        return
    with file.open("rb") as lines:
        for data in map(orjson.loads, filter(bytes.strip, lines)):
            if "traces" not in data:
                yield data
            for trace in data.get("traces", ()):
                yield from _branches(trace)


def _parquet(file: Path) -> _Rows:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(64):
            yield from batch.to_pylist()


def _samples(file: Path) -> _Rows:
    """Yield the samples that slime and miles write with `--save-debug-rollout-data`."""
    torch = import_module("torch")
    yield from torch.load(file, map_location="cpu", weights_only=True)["samples"]


_READERS = {".parquet": _parquet, ".jsonl": _json_lines, ".pt": _samples}


def _branches(trace: Mapping[str, Any]) -> _Rows:
    """Yield a row for each path from a root to a leaf of a trace of verifiers or prime-rl."""
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    if trace.get("agent", {}).get("trainable", True):
        for leaf in (node for index, node in enumerate(nodes) if index not in parents):
            path = [leaf]
            while path[0].get("parent") is not None:
                path.insert(0, nodes[path[0]["parent"]])
            mask = [bit for node in path for bit in node["mask"]]
            logprobs = iter([value for node in path for value in node.get("logprobs") or ()])
            yield {
                "input_ids": [index for node in path for index in node["token_ids"]],
                "loss_mask": mask,
                "logprobs": [next(logprobs, None) if bit else None for bit in mask],
                "messages": [_message(node["message"]) for node in path],
                "tools": [
                    {"type": "function", "function": tool} for tool in path[0].get("tools", ())
                ],
            }


def _message(message: Message) -> Message:
    calls = [{"id": call["id"], "function": call} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else message
