"""A loop that makes its tokens as slime's tau-bench example does, audited with the engine's log."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.published_loop import Delta, delta, play, slime_delta
from support.qwen import tokenizer_for, trl_template

from toolroll.evaluation.audit import AuditReport, audit
from toolroll.evaluation.audit.faults import NOT_SAMPLED, OTHER_PREFIX
from toolroll.evaluation.audit.request_log import read_record

CALL = '<tool_call>\n{"name": "find_order", "arguments": {"id": "W1"}}\n</tool_call>'
ORDER = {"role": "tool", "name": "find_order", "content": "shipped"}
USER = {"role": "user", "content": "Yes, please."}


def audited(
    name: str, said: list[str], tmp_path: Path, get_delta: Delta
) -> tuple[AuditReport, list[str]]:
    """The report on one episode, and the texts of the places with a fault."""
    tokenizer = tokenizer_for(trl_template(name))
    sample, lines = play(tokenizer, said, [ORDER, USER, USER][: len(said)], get_delta)
    log = tmp_path / "host_0.log"
    log.write_text("".join(lines), encoding="utf-8")
    report = audit([sample], record=read_record(log, tokenizer.encode))
    faults = [kind.fault for kind in report.kinds.values()]
    ids = [sample["tokens"][fault.start : fault.stop] for fault in faults]
    return report, [str(tokenizer.decode(each)) for each in ids]


@pytest.fixture(params=["alike", pytest.param("slime", marks=pytest.mark.peers)])
def get_delta(request: pytest.FixtureRequest) -> Delta:
    found = delta if request.param == "alike" else slime_delta()
    if found is None:
        pytest.skip("the example's files are in slime's checkout on GitHub only: make test-peers")
    return found


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_it_trains_the_newline_after_each_stop_token(
    name: str, tmp_path: Path, get_delta: Delta
) -> None:
    report, texts = audited(name, [CALL, "Is that all?", "Done."], tmp_path, get_delta)
    assert {kind: found.places for kind, found in report.kinds.items()} == {NOT_SAMPLED: 3}
    assert texts == ["\n"]


def test_it_trains_thoughts_after_other_tokens_than_were_served(
    tmp_path: Path, get_delta: Delta
) -> None:
    """Qwen3's template drops the thoughts of earlier turns when a user message comes."""
    said = [f"<think>\nI look.\n</think>\n\n{text}" for text in (CALL, "Is that all?", "Done.")]
    report, _ = audited("qwen3", said, tmp_path, get_delta)
    assert report.kinds[OTHER_PREFIX].places == 1  # after the first user message
    assert report.kinds[NOT_SAMPLED].places == 3  # and the newline, in each turn
