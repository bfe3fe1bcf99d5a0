"""Rows that cannot be read are refused with their file, their row, their field, and what to do. The
engine's record is read from SGLang's log.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.audited import REAL_LOG, request_line
from support.exports import varied, write_run

from toolroll.evaluation.audit import EngineRecord, audit
from toolroll.evaluation.audit.faults import CUT, NOT_SAMPLED
from toolroll.evaluation.audit.formats import read_rows
from toolroll.evaluation.audit.request_log import read_record
from toolroll.evaluation.audit.row import row_of
from toolroll.rollout.errors import UsageError

GOOD: dict[str, Any] = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"input_ids": None}, "there is no input_ids or tokens"),
        ({"input_ids": [1, "x", 3]}, "input_ids must be a list of numbers"),
        ({"input_ids": [1.5, 2, 3]}, "input_ids is 1.5 at token 0: not a whole number"),
        ({"loss_mask": None}, "there is no loss_mask"),
        ({"loss_mask": ["0", "1", "1"]}, "loss_mask must be a list of numbers, one for each token"),
        ({"loss_mask": [0, 1, 2]}, "loss_mask is 2 at token 2: it must be 0 or 1"),
        ({"loss_mask": [1, 1]}, "loss_mask has 2 values for 3 tokens"),
        ({"response_length": 4, "loss_mask": [1] * 4}, "loss_mask has 4 values for 3 tokens"),
        ({"messages": "[{"}, "messages is not JSON: "),
        ({"tools": "{}"}, "tools must be a list of objects"),
        ("{}x", "is not JSON: "),
        *((line, "") for line in ("3", '{"traces": [{}]}', '{"traces": 3}')),
    ],
)
def test_a_row_that_cannot_be_read(tmp_path: Path, change: Any, problem: str) -> None:
    """A line that is none has no problem of its own."""
    file = tmp_path / "rows.jsonl"
    second = change if isinstance(change, str) else json.dumps(GOOD | change)
    file.write_text(f"{json.dumps(GOOD)}\n{second}\n", encoding="utf-8")
    with pytest.raises(UsageError) as error:
        list(read_rows(file))
    start = f"{file}, row 2" if problem else f"{file} cannot be read after row 1: "
    assert str(error.value).startswith(start) and problem in str(error.value)


def test_no_rows(here: Path) -> None:
    write_run(here / "run", varied()[-1:])
    (here / "empty").mkdir()
    (here / "rows.jsonl").write_text("\n", encoding="utf-8")
    (here / "rows.pkl").touch()
    no_rows = r"has no rows: the formats are .parquet, .jsonl, .pt"
    broken = "cannot be read after row 0: .*pyarrow, .pt torch"
    for name in ("broken.pt", "broken.parquet"):
        (here / name).write_bytes(b"PK broken")
    for name, words in (
        ("empty", no_rows),
        ("rows.pkl", no_rows),
        ("rows.jsonl", no_rows),
        ("other", "no such file or folder: .*other"),
        ("run", "has no rows: its episodes were aborted"),
        ("broken.pt", f"broken.pt {broken}"),
        ("broken.parquet", f"broken.parquet {broken}"),
    ):
        with pytest.raises(UsageError, match=words):
            list(read_rows(Path(name)))


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
    """A label of another token is a fault."""
    sample = {"tokens": [1, 2, 3, 4], "response_length": 2, "rollout_log_probs": [-1.0, 0.0]}
    read = row_of(sample, "x")
    assert read.trained.tolist() == [False, False, True, True]
    assert np.isnan(read.logprobs).tolist() == [True, True, False, False]
    assert row_of(sample | {"loss_mask": [0, 1]}, "x").spans() == [(3, 4)]
    labeled = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    assert audit([labeled]).kinds == {}
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


# --- the engine's record from SGLang's log and from toolroll's own folders ------------------------


PROMPT, IDS, LOGPROBS = [9707, 11, 1879], [34534, 110797], [-11.05, -8.3]


def row(prompt: list[int], ids: list[int], logprobs: list[float] | None = None) -> dict[str, Any]:
    mask = [0] * len(prompt) + [1] * len(ids)
    values = None if logprobs is None else [None] * len(prompt) + logprobs
    return {"input_ids": prompt + ids, "loss_mask": mask, "logprobs": values}


def log_of(tmp_path: Path, *lines: str) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "host_0.log").write_text("".join(lines), encoding="utf-8")
    return folder


def test_the_lines_that_sglang_wrote() -> None:
    record = read_record(REAL_LOG)
    # not the health check, and not the prompt that was sent as text
    assert (record.answers, record.sampled_tokens, record.without_ids) == (2, 41, 1)
    ids = [34534, 110797, 28095, 9457, 41267]
    assert audit([row(PROMPT, ids)], record=record).kinds == {}
    assert set(audit([row(PROMPT, ids)], record=record).kinds) == {"trained twice"}
    encoded = [1, 2, 3, 4, 5]
    record = read_record(REAL_LOG, lambda text: encoded)
    assert (record.answers, record.without_ids) == (3, 0)
    assert audit([row(encoded, [31178, 36037, 16285])], record=record).kinds == {}
    # the engine encoded it otherwise
    assert read_record(REAL_LOG, lambda text: [1, 2]).without_ids == 1


def test_a_turn_of_several_answers_is_whole(tmp_path: Path) -> None:
    """The engine aborted the turn twice, and it was resumed."""
    ids = [5, 6, 7, 8]
    parts = [request_line(PROMPT + ids[:n], ids[n : n + 1], [-float(n)]) for n in (0, 1)]
    parts.append(request_line(PROMPT + ids[:2], ids[2:], [-2.0, -3.0]))
    record = read_record(log_of(tmp_path, *parts))
    assert audit([row(PROMPT, ids, [0.0, -1.0, -2.0, -3.0])], record=record).kinds == {}
    assert record.answers == 3


def test_a_turn_of_thousands_of_answers() -> None:
    """A loop that samples one token with each request."""
    record, ids = EngineRecord(), list(range(3000))
    for at in range(1000, 3000):
        record.add(np.arange(at), np.array([at]), None)
    row = {"input_ids": ids, "loss_mask": [0] * 1000 + [1] * 2000}
    assert audit([row], record=record).kinds == {}
    assert set(audit([row], record=record).kinds) == {"trained twice"}


def test_the_same_turn_may_be_one_answer_or_several() -> None:
    """Two episodes sampled the same turn, and one of them was resumed."""
    record = EngineRecord()
    for prompt, ids in (([1], [2, 3]), ([1], [2]), ([1, 2], [3])):
        record.add(np.array(prompt), np.array(ids), None)
    assert audit([row([1], [2, 3])] * 2, record=record).kinds == {}
    assert set(audit([row([1], [2, 3])], record=record).kinds) == {"trained twice"}


def test_a_part_that_other_weights_sampled_may_be_left_out() -> None:
    """slime's --mask-offpolicy-in-partial-rollout trains only what follows the pause."""
    record = EngineRecord()
    record.add(np.array([1]), np.array([2]), np.array([-1.0], np.float32))
    record.add(np.array([1, 2]), np.array([3]), np.array([-2.0], np.float32))
    sample: dict[str, Any] = {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [0, 1]}
    sample["rollout_log_probs"] = [-1.0, -2.0]
    assert audit([sample], record=record).kinds == {}
    assert audit([sample]).faulty_rows == 0


def test_where_a_fault_is_in_the_last_turn() -> None:
    """The row ends in an answer only if the answer is longer."""
    record = EngineRecord()
    record.add(np.array([1]), np.array([2, 3, 4]), None)
    same_length = audit([row([1], [2, 3, 5])], record=record).kinds
    assert [kind.fault for kind in same_length.values()] == [(NOT_SAMPLED, 1, 4, True)]
    cut = audit([row([1], [2, 3])], record=record).kinds
    assert [kind.fault for kind in cut.values()] == [(CUT, 1, 3, True)]
    more = audit([row([1], [2, 3, 4, 5])], record=record).kinds
    assert [kind.fault for kind in more.values()] == [(NOT_SAMPLED, 4, 5, True)]


def test_the_same_answer_may_be_given_twice(tmp_path: Path) -> None:
    line = request_line(PROMPT, IDS, LOGPROBS)
    other = request_line(PROMPT, IDS, [-1.0, -2.0])
    record = read_record(log_of(tmp_path, line, other))
    rows = [row(PROMPT, IDS, [-1.0, -2.0]), row(PROMPT, IDS, LOGPROBS)]
    report = audit([*rows, rows[0]], record=record)
    assert {name: len(kind.rows) for name, kind in report.kinds.items()} == {"trained twice": 1}
    assert (report.delivered_tokens, record.sampled_tokens) == (4, 4)


def test_logprobs_that_were_not_requested_are_not_compared(tmp_path: Path) -> None:
    record = read_record(log_of(tmp_path, request_line(PROMPT, IDS)))
    assert audit([row(PROMPT, IDS, LOGPROBS)], record=record).kinds == {}


def test_other_lines_and_an_incomplete_last_one_are_skipped(tmp_path: Path) -> None:
    line = request_line(PROMPT, IDS, LOGPROBS)
    folder = log_of(tmp_path, "[2026-11-29] server started\n", line, line[:-40])
    assert read_record(folder).answers == 1
    assert read_record(str(folder / "host_0.log")).answers == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (request_line(PROMPT, IDS).replace('"completion_tokens": 2', '"completion_tokens": 9'),
         "line 1 has no complete ids .* and without --incremental-streaming-output"),
        (request_line(PROMPT, IDS).replace('"output_ids"', '"x"'),
         "line 1 .* Start SGLang with --log-requests --log-requests-level 3"),
        (request_line([1], IDS).replace('"input_ids": [1]', '"input_ids": [1, "..."]'), "line 1 "),
        (request_line(PROMPT, IDS)[:-30] + "\n", "line 1 has no complete ids"),
        ("", "has no answers with ids"),
    ],
)  # fmt: skip
def test_a_log_without_ids_is_refused(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_record(log_of(tmp_path, line))
