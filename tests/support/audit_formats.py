"""Training rows in the formats that `toolroll audit` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.audited import Row


def write_lines(rows: list[Row], folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(rows: list[Row], folder: Path) -> Path:
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    for row in rows:
        row |= {name: json.dumps(row[name]) for name in ("messages", "tools")}
    path = folder / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_labels(rows: list[Row], folder: Path) -> Path:
    for row in rows:
        row["labels"] = [
            index if bit else -100
            for index, bit in zip(row["input_ids"], row.pop("loss_mask"), strict=True)
        ]
        del row["logprobs"]
    return write_lines(rows, folder)


def write_pt(rows: list[Row], folder: Path) -> Path:
    """As slime and miles do."""
    torch = pytest.importorskip("torch")
    samples = []
    for row in rows:
        first = row["loss_mask"].index(1)
        logprobs = [value or 0.0 for value in row["logprobs"][first:]]
        sample = {"tokens": row["input_ids"], "response_length": len(row["input_ids"]) - first}
        sample |= {"loss_mask": row["loss_mask"][first:], "rollout_log_probs": logprobs}
        samples.append({**sample, "status": "completed", "prompt": "x"})
    path = folder / "rollout_3.pt"
    torch.save({"rollout_id": 3, "samples": samples}, path)
    return path


def write_traces(rows: list[Row], folder: Path) -> Path:
    """As verifiers does: logprobs of trained tokens only, in four decimals."""
    lines = []
    for row in rows:
        mask = [bit == 1 for bit in row["loss_mask"][1:]]
        pairs = zip(row["logprobs"][1:], mask, strict=True)
        answer, task = ({"role": role, "content": "x"} for role in ("assistant", "user"))
        node: Row = {"parent": 0, "message": answer, "sampled": True, "mask": mask}
        node["logprobs"] = [round(value, 4) for value, bit in pairs if bit]
        node["token_ids"] = row["input_ids"][1:]
        root = {"message": task, "token_ids": row["input_ids"][:1], "mask": [False]}
        lines.append({"env": {"id": "x"}, "traces": [{"nodes": [root, node]}]})
    return write_lines(lines, folder)


def no_logprobs(row: Row) -> None:
    row["logprobs"] = [None] * len(row["logprobs"])


def only_trained(row: Row) -> None:
    """Each of them has a logprob."""
    pairs = zip(row["logprobs"], row["loss_mask"], strict=True)
    row["logprobs"] = [(value or 0.0) if bit else None for value, bit in pairs]


def every_trained(row: Row) -> None:
    """After the first trained token, a logprob of zero also means that there is none."""
    first = row["loss_mask"].index(1)
    row["logprobs"] = [
        None if at < first else (value or 0.0) if bit else value
        for at, (value, bit) in enumerate(zip(row["logprobs"], row["loss_mask"], strict=True))
    ]


FORMATS: dict[str, tuple[Callable[[list[Row], Path], Path], Callable[[Row], None]]] = {
    "jsonl": (write_lines, lambda row: None),
    "parquet": (write_parquet, lambda row: None),
    "labels": (write_labels, no_logprobs),
    "pt": (write_pt, every_trained),
    "traces": (write_traces, only_trained),
}
"""How to write rows, and what the format cannot hold of a row."""
