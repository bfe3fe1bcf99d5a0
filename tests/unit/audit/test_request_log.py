"""The engine's record from SGLang's log and from toolroll's own folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.audited import REAL_LOG, request_line

from toolroll.evaluation.audit import EngineRecord, audit
from toolroll.evaluation.audit.faults import CUT, NOT_SAMPLED
from toolroll.evaluation.audit.request_log import read_record
from toolroll.rollout.errors import UsageError

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


def test_a_prompt_that_was_sent_as_text_is_encoded() -> None:
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


def test_a_part_of_a_turn_that_other_weights_sampled_may_be_left_out() -> None:
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
