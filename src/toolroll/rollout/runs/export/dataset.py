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
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.export.recorded_run import is_graded, new_folder
from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.session.trajectory_json import to_json
from toolroll.rollout.types import Episode, Trajectory

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
    written: list[Path] = []
    with new_folder(folder):
        data = folder / "data"
        data.mkdir()
        rows = sample_rows(episodes)
        while batch := list(islice(rows, rows_of_a_file)):
            written.append(data / f"part-{len(written):05d}.parquet")
            parquet.write_table(table_of(batch, schema=schema), written[-1])
            counts.update((row["env"], row["model"]) for row in batch)
        if not counts:
            raise UsageError(
                "the run has nothing to train on: no graded episode with tokens that the engine "
                "sampled"
            )
        for number, part in enumerate(written):
            part.rename(data / f"train-{number:05d}-of-{len(written):05d}.parquet")
        (folder / "README.md").write_text(_card(counts, provenance), encoding="utf-8")
    return counts.total()


def _card(
    counts: Mapping[tuple[str, str], int], provenance: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return the card of the data set: its settings for `datasets` as YAML, and its description.

    `counts`: the number of rows by environment and model.
    """
    total = sum(counts.values())
    size = next((name for name, limit in _SIZES.items() if total < limit), "n>10M")
    header = {
        "pretty_name": f"Rollouts of {', '.join(sorted({env for env, _ in counts}))}",
        "task_categories": ["text-generation"],
        "tags": ["toolroll", "reinforcement-learning", "tool-calling"],
        "size_categories": [size],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": "train", "path": "data/train-*.parquet"}],
            }
        ],
    }
    rows = [
        f"| {env} | {model} | {count} | "
        + " | ".join(str(provenance.get(env, {}).get(name) or "unknown") for name in _FACTS)
        + " |"
        for (env, model), count in sorted(counts.items())
    ]
    return _CARD.format(
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True), rows="\n".join(rows)
    )


_FACTS = ("tokenizer_sha256", "toolroll")
_SIZES = {"n<1K": 1e3, "1K<n<10K": 1e4, "10K<n<100K": 1e5, "100K<n<1M": 1e6, "1M<n<10M": 1e7}
_CARD = """\
---
{header}---

# Token-exact tool rollouts

Each row is one training sequence that toolroll recorded. `input_ids` are the ids that were sent to
the engine or sampled by it. `loss_mask` is 1 for the sampled tokens that may be trained, and
`logprobs` is null for tokens that were not sampled. `messages` and `tools` are JSON text. Episodes
that were aborted or have no reward are left out.

| environment | model | rows | SHA-256 of the tokenizer | toolroll |
|---|---|---|---|---|
{rows}
"""


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
        if not is_graded(episode):
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
