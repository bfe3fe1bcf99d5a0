"""Play episodes against the embedded engine, and check their tokens with its request log."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.model.model import Model
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Trajectory
from toolroll.testing import EmbeddedEngine, LoggedRequest, reference_logprob


def call(name: str = "look", **arguments: Any) -> str:
    """A tool call as a model of the Hermes format writes it."""
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
    nowhere = trained_nowhere(trajectories, answers_of(engine, session_id))
    excluded = any(turn.excluded not in (None, "context") for t in trajectories for turn in t.turns)
    assert excluded or nowhere == refused, f"{nowhere} sampled turns are trained nowhere"
    assert engine.killed == 0
    for trajectory in trajectories:
        for at in np.flatnonzero(trajectory.loss_mask)[:5]:
            expected = reference_logprob(trajectory.input_ids[:at], int(trajectory.input_ids[at]))
            assert trajectory.logprobs[at] == np.float32(expected)


def answers_of(engine: EmbeddedEngine, session_id: str) -> list[LoggedRequest]:
    """The complete answers to the requests of a session."""
    log = [entry for entry in engine.log if entry.routing_key == session_id]
    return [entry for entry in log if entry.status == 200 and entry.output_ids]


def trained_nowhere(trajectories: Sequence[Any], answers: Sequence[Any]) -> int:
    """Return how many of an engine's `answers` are trained nowhere. Each sampled turn must be an
    answer to exactly its prefix, with the answer's logprobs, and no answer may be trained twice.
    All other tokens have no loss and no logprob.
    """
    left = {id(answer) for answer in answers}
    for part in trajectories:
        mask, outside = np.zeros(len(part.input_ids)), np.ones(len(part.input_ids), dtype=bool)
        for turn in part.turns:
            sampled = slice(turn.start, turn.stop)
            outside[sampled] = False
            fitting = [
                id(answer)
                for answer in answers
                if np.array_equal(answer.input_ids, part.input_ids[: turn.start])
                and np.array_equal(answer.output_ids, part.input_ids[sampled])
                and np.array_equal(np.array(answer.logprobs, np.float32), part.logprobs[sampled])
            ]
            assert fitting, "a turn's prompt, sampled ids and logprobs were never served together"
            if turn.excluded is None:
                free = left.intersection(fitting)
                assert free, "a sampled turn is trained twice"
                left.remove(free.pop())
                mask[sampled] = 1
        assert np.array_equal(part.loss_mask, mask)
        assert np.array_equal(np.isnan(part.logprobs), outside)
    return len(left)
