"""What cannot be read is refused: with its file, its row, its field, and what to do."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.exports import varied, write_run

from toolroll.evaluation.audit import audit
from toolroll.evaluation.audit.formats import read_rows
from toolroll.evaluation.audit.row import row_of
from toolroll.rollout.errors import UsageError

GOOD: dict[str, Any] = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"input_ids": None}, "there is no input_ids or tokens"),
        ({"input_ids": [1, "x", 3]}, "input_ids must be a list of numbers"),
        ({"input_ids": [[1, 2, 3]]}, "input_ids must be a list of numbers"),
        ({"input_ids": [1.5, 2, 3]}, "input_ids is 1.5 at token 0: no whole number"),
        ({"loss_mask": None}, "there is no loss_mask"),
        ({"loss_mask": ["0", "1", "1"]}, "loss_mask must be a list of numbers, one for each token"),
        ({"loss_mask": [0, 1, 2]}, "loss_mask is 2 at token 2: it must be 0 or 1"),
        ({"loss_mask": [0, -1, -1]}, "loss_mask is -1 at token 1: it must be 0 or 1"),
        ({"loss_mask": [1, 1]}, "loss_mask has 2 values for 3 tokens"),
        ({"labels": [1, 2]}, "labels has 2 values for 3 tokens"),
        ({"logprobs": [-1.0]}, "logprobs has 1 values for 3 tokens"),
        ({"logprobs": [{"1": -1.0}] * 3}, "logprobs must be a list of numbers"),
        ({"response_length": 4, "loss_mask": [1] * 4}, "loss_mask has 4 values for 3 tokens"),
        ({"messages": "[{"}, "messages is not JSON: "),
        ({"messages": [1]}, "messages must be a list of objects"),
        ({"tools": "{}"}, "tools must be a list of objects"),
    ],
)
def test_a_row_that_cannot_be_read(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | change)}\n", encoding="utf-8")
    with pytest.raises(UsageError) as error:
        list(read_rows(file))
    assert str(error.value).startswith(f"{file}, row 2: {problem}")


@pytest.mark.parametrize("text", ["{}x\n", "3\n", '{"traces": [{}]}\n', '{"traces": 3}\n'])
def test_a_line_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{text}", encoding="utf-8")
    with pytest.raises(UsageError, match=r"rows.jsonl cannot be read after row 1: "):
        list(read_rows(file))


def test_no_rows(here: Path) -> None:
    write_run(here / "run", varied()[-1:])
    (here / "empty").mkdir()
    (here / "rows.jsonl").write_text("\n", encoding="utf-8")
    (here / "rows.pkl").touch()
    no_rows = r"has no rows: the formats are .parquet, .jsonl, .pt"
    for name, words in (
        ("empty", no_rows),
        ("rows.pkl", no_rows),
        ("rows.jsonl", no_rows),
        ("other", "no such file or folder: .*other"),
        ("run", "has no rows: its episodes were aborted"),
    ):
        with pytest.raises(UsageError, match=words):
            list(read_rows(Path(name)))


@pytest.mark.parametrize("name", ["rows.pt", "rows.parquet"])
def test_a_broken_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK broken")
    words = f"{name} cannot be read after row 0: .*pyarrow, .pt torch"
    with pytest.raises(UsageError, match=words):
        list(read_rows(tmp_path))


class Spy:
    """Unpickling it runs code."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("unpickled"),))


def test_nothing_is_unpickled(here: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"samples": [Spy()]}, here / "rows.pt")
    (here / "old.pt").write_bytes(pickle.dumps({"samples": [Spy()]}, protocol=2))
    for name in ("rows.pt", "old.pt"):
        with pytest.raises(UsageError, match="cannot be read after row 0"):
            list(read_rows(here / name))
    assert not (here / "unpickled").exists()


def test_slimes_sample_without_a_mask_is_trained_as_a_whole() -> None:
    sample = {"tokens": [1, 2, 3, 4], "response_length": 2, "rollout_log_probs": [-1.0, 0.0]}
    row = row_of(sample, "x")
    assert row.trained.tolist() == [False, False, True, True]
    assert np.isnan(row.logprobs).tolist() == [True, True, False, False]
    assert row_of(sample | {"loss_mask": [0, 1]}, "x").spans() == [(3, 4)]


def test_labels_that_are_not_the_tokens() -> None:
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    assert audit([row]).kinds == {}
    shifted = {"input_ids": [5, 6, 7, 8], "labels": [-100, 7, 8, -100]}
    assert set(audit([shifted]).kinds) == {"a label is not the token"}


def test_branches_of_a_trace(tmp_path: Path) -> None:
    def node(parent: int | None, role: str, ids: list[int], bit: bool) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "name": "look", "arguments": "{}"}
        message = {"role": role, "content": "x", **({"tool_calls": [call]} if bit else {})}
        logprobs = [-0.5] * len(ids) if bit else []
        fields = {"message": message, "token_ids": ids, "mask": [bit] * len(ids)}
        return {**fields, "logprobs": logprobs} | ({} if parent is None else {"parent": parent})

    nodes = [
        {**node(None, "user", [1, 2], False), "tools": [{"name": "look"}]},
        node(0, "assistant", [3], True),
        node(1, "tool", [4], False),
        node(0, "assistant", [5], True),
    ]
    judge = {"nodes": nodes, "agent": {"trainable": False}}
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps({"traces": [{"nodes": nodes}, judge]}), encoding="utf-8")
    rows = list(read_rows(file))
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 5]]
    assert [row.spans() for row in rows] == [[(2, 3)], [(2, 3)]]
    assert rows[0].messages[1]["tool_calls"][0]["function"]["name"] == "look"
    assert rows[0].tools == [{"type": "function", "function": {"name": "look"}}]
