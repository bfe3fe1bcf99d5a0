"""The AReaL adapter with AReaL's types (1.0.4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.framework_engines import ArealInference, GenerationHyperparameters, install_areal
from support.slime_trainer import reference_lines

from toolroll.rollout.adapters.areal import ToolrollWorkflow
from toolroll.rollout.adapters.episodes import EpisodeSettings
from toolroll.rollout.errors import UsageError
from toolroll.rollout.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer

SETTINGS = EpisodeSettings(
    env="desk", tool_call_parser="hermes", verify="always", max_turns=12, retries=0
)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    pytest.importorskip("torch", reason="AReaL takes tensors: install torch for the CPU")
    return install_areal(monkeypatch)


def plays(request: PolicyRequest) -> str:
    """The reference of task 0."""
    said = reference_lines(0)
    turn = request.text.count("<|turn|>assistant") - 1
    return said[turn] if turn < len(said) else "Goodbye."


@asynccontextmanager
async def workflow(
    settings: EpisodeSettings = SETTINGS, **config: Any
) -> AsyncIterator[tuple[ToolrollWorkflow, ArealInference]]:
    async with EmbeddedEngine(load_embedded_tokenizer(), plays) as engine:
        gconfig = GenerationHyperparameters(max_new_tokens=256, **config)
        own = ToolrollWorkflow(gconfig, load_embedded_tokenizer(), settings)
        yield own, ArealInference(engine.url)
        await own.aclose()


async def test_an_episode_is_a_row_of_tensors(recorded: dict[str, list[float]]) -> None:
    async with workflow() as (own, engine):
        row: Any = await own.arun_episode(engine, {"index": 0, "metadata": {"env": "desk"}})
    assert {name: (tuple(value.shape), str(value.dtype)) for name, value in row.items()} == {
        **dict.fromkeys(
            ("input_ids", "loss_mask", "versions"), ((1, row["input_ids"].numel()), "torch.int32")
        ),
        "logprobs": ((1, row["input_ids"].numel()), "torch.float32"),
        "attention_mask": ((1, row["input_ids"].numel()), "torch.bool"),
        "rewards": ((1,), "torch.float32"),
    }
    mask, versions = row["loss_mask"][0].tolist(), row["versions"][0].tolist()
    assert [value >= 0 for value in versions] == [bool(value) for value in mask]
    ends = [at for at, value in enumerate(mask) if value and not [*mask, 0][at + 1]]
    assert [versions[at] for at in ends] == [engine.version + 1] * len(ends)
    assert versions.count(engine.version) == sum(mask) - len(ends)
    assert row["rewards"].item() == 1.0 and recorded["reward"] == [1.0]
    assert recorded["left_out_tokens"] == [0] and recorded["num_turns"] == [len(ends)]
    assert len({asked.rid for asked in engine.seen}) == 1, "the prefix cache would be lost"
    assert all(asked.gconfig.n_samples == 1 for asked in engine.seen)


async def test_an_aborted_episode_is_rejected() -> None:
    async with workflow() as (own, engine):
        answers = engine.agenerate

        async def failing(req: Any) -> Any:
            answer = await answers(req)
            answer.output_logprobs.pop()
            return answer

        engine.agenerate = failing  # type: ignore[method-assign]
        assert await own.arun_episode(engine, {"index": 0}) is None


async def test_a_first_prompt_that_is_too_long_is_rejected() -> None:
    async with workflow(SETTINGS.model_copy(update={"context_length": 16})) as (own, engine):
        assert await own.arun_episode(engine, {"index": 0}) is None
    assert engine.seen == []


async def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(UsageError, match="use_beam_search is not supported"):
        async with workflow(use_beam_search=True):
            pass
    async with workflow() as (own, engine):
        with pytest.raises(UsageError, match="no key 'index'"):
            await own.arun_episode(engine, {"messages": []})
