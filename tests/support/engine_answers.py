"""What an engine answered, as a plain proxy saw it, and the check of episodes by that."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from support.episodes import trained_nowhere
from support.proxy import CountingProxy, SeenRequest

from toolroll.rollout.types import Trajectory

CLOSE = 1e-4
"""The largest difference between two computations of a logprob in float32."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    session: str
    input_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]


def engine_answers(proxy: CountingProxy) -> list[EngineAnswer]:
    """The complete answers that passed through `proxy`. The client may hang up at the end of a
    stream, before the proxy has passed on the end of the connection."""
    return [_answer(seen) for seen in proxy.generations() if b'"finish_reason":{' in seen.answer]


def _answer(seen: SeenRequest) -> EngineAnswer:
    lines = bytes(seen.answer).split(b"\n")
    if seen.answer.startswith(b"data:"):  # each event has everything so far
        lines = [line[6:] for line in lines if line.startswith(b"data: {")][-1:]
    sampled = json.loads(lines[0])["meta_info"]["output_token_logprobs"]
    return EngineAnswer(
        session=str(seen.routing_key),
        input_ids=seen.json()["input_ids"],
        output_ids=[entry[1] for entry in sampled],
        logprobs=[entry[0] for entry in sampled],
    )


def judge_answers(trajectories: Sequence[Trajectory], answers: Sequence[EngineAnswer]) -> None:
    """Each of `answers`, which are those of one session, is one turn and trained exactly once, with
    the engine's ids and logprobs. Nothing else is trained."""
    turns = [turn for part in trajectories for turn in part.turns]
    assert all(turn.excluded in (None, "context") for turn in turns)  # trained in another sequence
    assert trained_nowhere(trajectories, answers) == 0


def largest_error(folder: Path, trajectories: Sequence[Trajectory]) -> float:
    """The largest difference between the logprobs of trained tokens and those that transformers
    computes with the model in `folder`."""
    import torch

    model, largest = _model(folder), 0.0
    for part in trajectories:
        trained = torch.tensor(np.flatnonzero(part.loss_mask))
        ids = torch.tensor(part.input_ids.astype(np.int64))
        with torch.no_grad():
            hidden = model.model(ids[None]).last_hidden_state[0, trained - 1]
            logprobs = torch.log_softmax(model.lm_head(hidden), dim=-1)
        expected = logprobs.gather(1, ids[trained, None])[:, 0].numpy()
        largest = max(largest, float(np.abs(part.logprobs[trained] - expected).max()))
    return largest


@cache
def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()
