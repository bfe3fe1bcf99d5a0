"""Clean rows of many templates have no fault: forked ones, and those whose history is kept."""

from __future__ import annotations

from typing import Any

import pytest
from support.adversarial.size import FULL
from support.audited import Played, play

from toolroll.evaluation.audit import TemplateCheck, audit
from toolroll.evaluation.audit.report import UNDECIDED

QUICK = ("qwen2_5", "qwen3", "llama3_1", "glm4moe", "gptoss", "gemma4")
OTHERS = """
deepseekv3 lfm2_2_5 lfm2_v2 llama3_2 mistral muse_glimmer nemotron_3_nano nemotron_3_super
qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 qwen3_instruct_2507 qwen3_vl
""".split()
ROWS = 10_000 if FULL else 400
"""TOOLROLL_ADVERSARIAL=full plays all of them, for an hour."""


def assert_clean(played: Played, check: TemplateCheck) -> None:
    record = played.record()
    report = audit(played.rows, record=record, template=check)
    assert report.kinds == {}
    assert report.delivered_tokens == report.trained_tokens <= record.sampled_tokens
    alone = audit(played.rows, template=check)
    assert [kind for kind in alone.kinds if not kind.startswith(UNDECIDED)] == []


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
async def test_many_clean_rows_have_no_fault(name: str) -> None:
    rows, seed, check = 0, 0, None
    while rows * len([*QUICK, *OTHERS]) < ROWS:
        history = ("fork", "scaffold", "preserve")[seed % 3]
        played = await play(name, 20, history=history, seed=seed)
        check = check or TemplateCheck(played.tokenizer)
        assert_clean(played, check)
        rows, seed = rows + len(played.rows), seed + 1
