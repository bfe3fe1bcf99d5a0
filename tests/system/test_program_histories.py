"""Claude Code's requests with Qwen3.5's template, which drops thoughts after a user message: the
shape of which slime's adapter made 64 samples of 8 rollouts (slime#2288)."""

from pathlib import Path
from typing import Any

import pytest
from clients.captures import PROGRAM, ROLLOUTS, TURNS, reply
from support.episodes import opened_model
from support.program_trials import command_of, factory, play, program, refusal, write_task
from support.qwen import extra_templates, tokenizer_for

from toolroll.parsers.infer import infer_parser
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Trajectory
from toolroll.testing import EmbeddedEngine

SOURCE = extra_templates().get("qwen3_5_think", "")

pytestmark = [
    pytest.mark.skipif(bool(refusal()), reason=f"needs user namespaces: {refusal()}"),
    pytest.mark.skipif(not SOURCE, reason="needs Qwen3.5's template (TOOLROLL_TEST_DATA)"),
    pytest.mark.tokens,
]


async def _played(tmp_path: Path, history: Any) -> tuple[list[tuple[Trajectory, ...]], int]:
    """The sequences of each rollout, and the number of tokens that the engine sampled."""
    write_task(tmp_path)
    tokenizer = tokenizer_for(SOURCE)
    async with EmbeddedEngine(tokenizer, reply, context_length=200_000) as engine:
        template, parser = ChatTemplate(tokenizer, history=history), infer_parser(tokenizer, None)
        async with opened_model(engine.url, tokenizer, parser, template=template) as model:
            command = command_of(PROGRAM)
            agent = program(model, command, verify="always")
            played = await play(factory(tmp_path), agent, samples=ROLLOUTS, concurrency=2)
        sampled = sum(len(entry.output_ids or ()) for entry in engine.log)
    assert all(not episode.result.info.get("error") for episode in played.values())
    return [episode.result.trajectories for episode in played.values()], sampled


@pytest.mark.parametrize(
    ("history", "sequences"),
    [("preserve", 1), ("fork", TURNS)],  # with "fork", each reminder begins another sequence
)
async def test_each_token_is_trained_once(tmp_path: Path, history: str, sequences: int) -> None:
    rollouts, sampled = await _played(tmp_path, history)
    assert len(rollouts) == ROLLOUTS
    trained = sum(part.trained_tokens for parts in rollouts for part in parts)
    assert trained == sampled
    for title, *main in rollouts:
        assert (len(title.turns), len(main)) == (1, sequences)
        assert [len(part.turns) for part in main] == [TURNS // sequences] * sequences
