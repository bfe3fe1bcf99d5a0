"""`write_dataset`: writes training samples as a folder of Parquet files for
`datasets.load_dataset`, `pyarrow.dataset`, pandas and polars.

Invariants:

- There is one row per training sequence, and only the rows of one file are in memory at a time.
- Aborted episodes are left out, and so are sequences without a trained token and sequences that no
  engine sampled, such as those of a baseline.
- `loss_mask` and `logprobs` have one value for each token of `input_ids`. The logprobs of tokens
  that were not sampled are null.
- An existing folder is never changed.
- Beside the card `README.md`, the folder has only `data`, which has only Parquet files, because
  some readers open every file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from toolroll.evaluation.export.exported_run import is_graded
from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.disk import new_folder
from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.session.trajectory_json import to_json
from toolroll.rollout.types import Trajectory

ROWS_OF_A_FILE = 2000


def write_dataset(
    episodes: Iterable[Episode],
    folder: Path,
    *,
    provenance: Mapping[str, Mapping[str, Any]] = {},
    rows_of_a_file: int = ROWS_OF_A_FILE,
) -> int:
    """Write the samples of `episodes` into the new `folder`. Return the number of samples.

    `provenance`: that of each environment, for the card.

    Raises `UsageError` if pyarrow is missing, if `folder` exists or cannot be created, or if there
    are no samples, because `datasets` cannot read an empty data set.
    """
    parquet, schema, table_of = _arrow()
    counts: Counter[tuple[str, str]] = Counter()
    with new_folder(folder):
        data = folder / "data"
        data.mkdir()
        rows = sample_rows(episodes)
        while batch := list(islice(rows, rows_of_a_file)):
            part = data / f"train-{counts.total() // rows_of_a_file:05d}.parquet"
            parquet.write_table(table_of(batch, schema=schema), part)
            counts.update((row["env"], row["model"]) for row in batch)
        if not counts:
            raise UsageError(
                "the run has nothing to train on: no graded episode with tokens that the engine "
                "sampled"
            )
        (folder / "README.md").write_text(_card(counts, provenance), encoding="utf-8")
    return counts.total()


def _card(
    counts: Mapping[tuple[str, str], int], provenance: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return the card of the data set. `counts`: the number of rows by environment and model."""
    tokenizers = {env: facts.get("tokenizer_sha256") for env, facts in provenance.items()}
    rows = [
        f"| {env} | {model} | {count} | {tokenizers.get(env) or 'unknown'} |\n"
        for (env, model), count in sorted(counts.items())
    ]
    return _CARD + "".join(rows)


_CARD = """\
---
configs:
- config_name: default
  data_files: [{split: train, path: "data/train-*.parquet"}]
tags: [toolroll, reinforcement-learning, tool-calling]
task_categories: [text-generation]
---
# Token-exact tool rollouts

Each row is one training sequence. `input_ids` were sent to the engine or sampled by it. `loss_mask`
is 1 for sampled tokens that may be trained. `logprobs` is null for tokens that were not sampled.

| environment | model | rows | SHA-256 of the tokenizer |
|---|---|---|---|
"""


_COLUMNS = """
env:text task_id:text task_index:large sample:large sequence:small seed:large model:text
reward:number status:text stop_reason:text input_ids:ids loss_mask:ids logprobs:logprobs
prompt_length:small fork_reason:text weight_versions:spans messages:text tools:text
"""


def _arrow() -> tuple[Any, Any, Any]:
    """Return pyarrow's Parquet module, the schema, and a function that converts rows to a table."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UsageError("Parquet needs pyarrow: pip install pyarrow") from error
    text, small = pyarrow.string(), pyarrow.int32()
    span = pyarrow.struct([("version", text), ("start", small), ("stop", small)])
    types = {
        "text": text,
        "small": small,
        "large": pyarrow.int64(),
        "number": pyarrow.float64(),
        "ids": pyarrow.list_(small),
        "logprobs": pyarrow.list_(pyarrow.float32()),
        "spans": pyarrow.list_(span),
    }
    columns = [column.split(":") for column in _COLUMNS.split()]
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns])
    return pyarrow.parquet, schema, pyarrow.Table.from_pylist


_OF_EPISODE = ("env", "task_id", "task_index", "sample", "seed", "model")
_OF_SEQUENCE = ("input_ids", "loss_mask", "logprobs", "prompt_length", "fork_reason")


def sample_rows(episodes: Iterable[Episode]) -> Iterator[dict[str, Any]]:
    """Yield one row of plain values per sequence. `messages` and `tools` are JSON text, because a
    column of a Parquet file has one type, but their structure differs between episodes.
    """
    for episode in episodes:
        result = episode.result
        if not is_graded(episode):
            continue
        for number, part in enumerate(result.trajectories):
            if part.source == "engine" and part.trained_tokens:
                yield _row(episode, number, part)


def _row(episode: Episode, number: int, part: Trajectory) -> dict[str, Any]:
    result, values = episode.result, to_json(part)
    return {
        **{name: getattr(episode, name) for name in _OF_EPISODE},
        **{name: values[name] for name in _OF_SEQUENCE},
        "sequence": number,
        "reward": result.reward,
        "status": result.status.value,
        "stop_reason": str(result.stop_reason),
        "weight_versions": [asdict(span) for span in part.weight_versions],
        "messages": json_bytes(result.messages).decode(),
        "tools": json_bytes(result.tools).decode(),
    }
