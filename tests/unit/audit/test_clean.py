"""Clean rows of many templates have no fault: forked ones, and those whose history is kept."""

from __future__ import annotations

from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from support.adversarial.size import FULL
from support.audit_formats import FORMATS
from support.audited import Played, play

from toolroll.evaluation.audit import TemplateCheck, audit
from toolroll.evaluation.audit.formats import read_rows

QUICK = ("qwen2_5", "qwen3", "llama3_1", "glm4moe", "gptoss", "gemma4")
OTHERS = """
deepseekv3 lfm2_2_5 lfm2_v2 llama3_2 mistral muse_glimmer nemotron_3_nano nemotron_3_super
qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 qwen3_instruct_2507 qwen3_vl
""".split()
HISTORIES = ("fork", "scaffold", "preserve")
ROWS, EPISODES = (10_000, 60) if FULL else (400, 8)
"""The rows of all templates, and the episodes of a batch. TOOLROLL_ADVERSARIAL=full plays the most,
for half an hour.
"""


def assert_clean(played: Played, check: TemplateCheck) -> None:
    record = played.record()
    report = audit(played.rows, record=record, template=check)
    assert report.kinds == {}
    assert report.with_messages == report.rows == len(played.rows)
    assert report.delivered_tokens == report.trained_tokens <= record.sampled_tokens


def assert_clean_in(kind: str, played: Played, folder: Path) -> None:
    """In a file of the format `kind`."""
    write, held = FORMATS[kind]
    rows = deepcopy(played.rows)
    for row in rows:
        held(row)
    report = audit(read_rows(write(rows, folder)), record=played.record())
    assert (report.kinds, report.rows) == ({}, len(played.rows))
    assert report.delivered_tokens == report.trained_tokens


@pytest.mark.parametrize("name", QUICK)
async def test_clean_rows_have_no_fault(name: str) -> None:
    played: dict[Any, Played] = {}
    for history in ("fork", "preserve"):
        played[history] = await play(name, 2, history=history)
        assert_clean(played[history], TemplateCheck(played[history].tokenizer))
    if name in ("qwen3", "glm4moe", "gptoss", "gemma4"):
        assert any(row["fork_reason"] for row in played["fork"].rows)
        assert len(played["preserve"].rows) < len(played["fork"].rows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
async def test_many_clean_rows_have_no_fault(name: str, tmp_path: Path) -> None:
    """With forks, without, and with history that is kept. One batch of each in each format."""
    rows, check = 0, None
    for seed, history in enumerate(cycle(HISTORIES)):
        if seed >= len(HISTORIES) and rows * len([*QUICK, *OTHERS]) >= ROWS:
            break
        played = await play(name, EPISODES, history=history, seed=seed)
        check = check or TemplateCheck(played.tokenizer)
        assert_clean(played, check)
        for kind in FORMATS if seed < len(HISTORIES) else ():
            assert_clean_in(kind, played, tmp_path)
        rows += len(played.rows)
