"""Play episodes against the embedded engine, and check their tokens with its request log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.model.model import Model
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import InteractionResult, Trajectory
from toolroll.testing import EmbeddedEngine, reference_logprob


def call(name: str = "look", **arguments: Any) -> str:
    """A tool call as a model of the Hermes format writes it."""
    import json

    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


TEMPLATE_OPTIONS = {"history", "images", "chat_template"}


@asynccontextmanager
async def opened_model(
    url: str,
    tokenizer: Any,
    parser: str = "hermes",
    *,
    template: ChatTemplate | None = None,
    client: type[Engine] = Engine,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Model]:
    """A model of the engine or router at `url`; `options` are those of `Model`."""
    template = ChatTemplate(tokenizer) if template is None else template
    settings = {"engine": url, "vocab_size": len(tokenizer), **(config or {})}
    reader = get_parser(parser, template.encoder.control)
    async with Model(client(EngineConfig(**settings)), template, reader, **options) as model:
        yield model


@asynccontextmanager
async def serving(
    tokenizer: Any,
    policy: Any,
    *,
    max_resumes: int = 0,
    config: dict[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[tuple[EmbeddedEngine, Model]]:
    """An embedded engine with a served model on top of it."""
    template = {name: engine.pop(name) for name in TEMPLATE_OPTIONS & engine.keys()}
    options = {name: engine.pop(name) for name in {"client", "threads"} & engine.keys()}
    options |= {"config": {"backoff": 0.001, **(config or {})}, "max_resumes": max_resumes}
    async with EmbeddedEngine(tokenizer, policy, **engine) as embedded:
        options["template"] = ChatTemplate(tokenizer, **template)
        async with opened_model(embedded.url, tokenizer, **options) as model:
            yield embedded, model


def agent(model: Model, **settings: Any) -> TrainableToolCallingAgent:
    """An agent that executes all calls; `settings` are `CallPolicy`'s fields."""
    verify = settings.pop("verify", "always")
    return TrainableToolCallingAgent(
        model=model,
        policy=CallPolicy(**settings),
        rollout_args={"verify": verify},
        sampling_params={"max_new_tokens": 512, "temperature": 1.0},
    )


def judge(
    result: InteractionResult, engine: EmbeddedEngine, session_id: str, *, refused: int = 0
) -> None:
    """I1, I2 and the logprobs of one episode, by the requests that the engine saw; `refused`: how
    many of its answers the client must have refused."""
    judge_tokens(result.trajectories, engine, session_id, refused=refused)


def judge_tokens(
    trajectories: Sequence[Trajectory], engine: EmbeddedEngine, session_id: str, *, refused: int = 0
) -> None:
    """As `judge`, of the trajectories of a session."""
    requests = [
        entry
        for entry in engine.log
        if entry.routing_key == session_id and entry.status == 200 and entry.output_ids
    ]
    sampled = {id(entry): False for entry in requests}
    for trajectory in trajectories:
        _judge_trajectory(trajectory, requests, sampled)
    excluded = any(turn.excluded not in (None, "context") for t in trajectories for turn in t.turns)
    if not excluded:
        assert list(sampled.values()).count(False) == refused, "a sampled turn is trained nowhere"
    assert engine.killed == 0


def _judge_trajectory(
    trajectory: Trajectory, requests: list[Any], sampled: dict[int, bool]
) -> None:
    mask = np.zeros(len(trajectory), dtype=np.int32)
    for turn in trajectory.turns:
        prompt, said = (
            trajectory.input_ids[: turn.start],
            trajectory.input_ids[turn.start : turn.stop],
        )
        entry = next(
            (
                e
                for e in requests
                if len(e.input_ids) == turn.start
                and np.array_equal(e.input_ids, prompt)
                and np.array_equal(np.array(e.output_ids), said)
            ),
            None,
        )
        assert entry is not None, "a turn's prompt and sampled ids were never served together"
        assert np.array_equal(
            trajectory.logprobs[turn.start : turn.stop], np.array(entry.logprobs, dtype=np.float32)
        )
        if turn.excluded is None:
            assert not sampled[id(entry)], "a sampled turn is trained twice"
            sampled[id(entry)] = True
            mask[turn.start : turn.stop] = 1
    assert np.array_equal(trajectory.loss_mask, mask)
    outside = np.ones(len(trajectory), dtype=bool)
    for turn in trajectory.turns:
        outside[turn.start : turn.stop] = False
    assert np.isnan(trajectory.logprobs[outside]).all()
    for at in np.flatnonzero(trajectory.loss_mask)[:5]:
        expected = reference_logprob(trajectory.input_ids[:at], int(trajectory.input_ids[at]))
        assert trajectory.logprobs[at] == np.float32(expected)
