"""Episodes on the real SGLang server, audited with the log that it writes."""

import asyncio
from pathlib import Path

import pytest
from integration.test_episodes import play, serving
from support.adversarial.size import FULL
from support.planted import PLANTED, plant, spans
from support.qwen import qwen3_tokenizer
from support.servers import sglang_server

from toolroll.evaluation.audit import TemplateCheck, audit
from toolroll.evaluation.audit.report import UNDECIDED
from toolroll.evaluation.audit.request_log import FLAGS, read_record
from toolroll.rollout.session.trajectory_json import to_json

EPISODES = 200 if FULL else 20
"""TOOLROLL_ADVERSARIAL=full plays more."""
NO_FAULT = {"a turn is not trained", "a result is appended"}
OF_WORDS = {"a turn is encoded again"}
"""The random model samples no words."""


@pytest.mark.timeout(3600)
async def test_episodes_are_what_the_servers_log_has(tmp_path: Path) -> None:
    log = tmp_path / "requests"
    with sglang_server(
        tmp_path, flags=FLAGS.replace("DIR", str(log)).split(), name="log"
    ) as server:
        async with serving(server.url) as served:
            names = [f"audited-{number}" for number in range(EPISODES)]
            results = await asyncio.gather(*(play(served, name) for name in names))
    rows = [
        {**to_json(part), "sequence": number, "messages": result.messages, "tools": result.tools}
        for result in results
        for number, part in enumerate(result.trajectories)
    ]
    record = read_record(log)
    report = audit(rows, record=record)
    assert report.kinds == {}
    assert len(rows) >= EPISODES
    assert report.delivered_tokens == report.trained_tokens == record.sampled_tokens
    # turns were truncated, and closed by the template: undecided without the record
    alone = audit(rows, template=TemplateCheck(qwen3_tokenizer()))
    assert [kind for kind in alone.kinds if not kind.startswith(UNDECIDED)] == []

    whole = [row for row in rows if len(spans(row)) >= 4][:2]
    assert len(whole) == 2
    for name, fault in PLANTED.items():
        if "message" in name or name in NO_FAULT | OF_WORDS:
            continue
        found = audit(plant(fault, whole), record=read_record(log)).kinds
        assert found, name
