"""`AgentExecutor`: play one sample of OpenRLHF with any program that uses `openai.AsyncOpenAI`.

Invariants: there is no server, port or thread: the agent's calls are answered in the caller's event
loop; samples share no mutable state; an overflow truncates the sample and keeps its earlier turns.
"""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from openai import BadRequestError

from toolroll.parsers.registry import get_parser
from toolroll.rollout.adapters.openrlhf.vllm_engine import LlmEngine, VllmEngine
from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.server.config import EndpointSettings
from toolroll.rollout.server.endpoint import Endpoint
from toolroll.rollout.server.in_process.client import ToolrollClient
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Trajectory


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an agent's run. OpenRLHF filters by `scores` (default: the reward)."""

    reward: float
    scores: float | None = None
    extra_logs: Mapping[str, float] = field(default_factory=dict)


class AgentExecutor:
    """The base class of your executor. Override `run_agent`, and pass the file of your class, which
    must be named `AgentExecutor`, as `--train.agent_func_path`.

    `parser` is the model's tool-call format, by SGLang's name.
    """

    parser = "hermes"

    def __init__(self) -> None:
        self._templates: WeakKeyDictionary[Any, ChatTemplate] = WeakKeyDictionary()

    async def run_agent(self, client: ToolrollClient, prompt: Any, label: Any) -> Outcome | float:
        """Play one sample with `client`, and return its reward. The default is a single turn with
        reward 0: `prompt` as the user's message, or as the messages."""
        messages: Any = (
            prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        )
        await client.chat.completions.create(model=client.endpoint.model, messages=messages)
        return 0.0

    def choose(self, trajectories: Sequence[Trajectory]) -> Trajectory:
        """Return the sequence to train on, since OpenRLHF takes one per sample: the one with the
        most trained tokens. The others (of sub-agents or forks) are counted in `extra_logs`."""
        return max(trajectories, key=lambda found: found.trained_tokens)

    async def execute(
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LlmEngine,
        images: Any = None,
    ) -> dict[str, Any]:
        """OpenRLHF 0.11's call for one sample: its result dict. `rollout_log_probs` is None
        if the trainer does not want them.
        """
        if images:
            raise UsageError(
                "images are not supported: the chat template's text does not have their tokens"
            )
        template = self._template(hf_tokenizer)
        engine = VllmEngine(
            llm_engine, sampling_params, max_length=max_length, vocab_size=len(hf_tokenizer)
        )
        served = Model(
            engine, template, get_parser(self.parser, template.encoder.control), threads=1
        )
        endpoint = Endpoint(served, EndpointSettings(default_max_tokens=sampling_params.max_tokens))
        try:
            await endpoint.start()
            client = ToolrollClient(endpoint, session=f"openrlhf-{uuid.uuid4().hex}")
            outcome, overflow = await self._played(client, prompt, label)
            trajectories = await client.trajectories()
        finally:
            await endpoint.aclose()
            served.release()
        if not trajectories:
            raise RolloutError(
                "run_agent ended without a reply of the model: there is nothing to train on"
            )
        result = _result(self.choose(trajectories), trajectories, outcome, overflow=overflow)
        if sampling_params.logprobs is None:
            result["rollout_log_probs"] = None
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "mm_train_inputs": None,
            **result,
        }

    async def _played(
        self, client: ToolrollClient, prompt: Any, label: Any
    ) -> tuple[Outcome, bool]:
        try:
            outcome = await self.run_agent(client, prompt, label)
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return Outcome(0.0), True
        return (outcome if isinstance(outcome, Outcome) else Outcome(float(outcome))), False

    def _template(self, tokenizer: Any) -> ChatTemplate:
        """Return the chat template of `tokenizer`, one per tokenizer, to share its cache."""
        if tokenizer not in self._templates:
            self._templates[tokenizer] = ChatTemplate(tokenizer)
        return self._templates[tokenizer]


def _result(
    chosen: Trajectory, every: Sequence[Trajectory], outcome: Outcome, *, overflow: bool
) -> dict[str, Any]:
    trained = [turn for turn in chosen.turns if turn.excluded is None]
    left_out = sum(found.trained_tokens for found in every) - chosen.trained_tokens
    mask = chosen.loss_mask.astype(bool)
    return {
        "reward": outcome.reward,
        "scores": outcome.reward if outcome.scores is None else outcome.scores,
        "observation_tokens": chosen.input_ids.tolist(),
        "action_ranges": [(turn.start, turn.stop) for turn in trained],
        "rollout_log_probs": np.where(mask, chosen.logprobs, 0.0).tolist(),
        "truncated": overflow or any(turn.finish_reason == "length" for turn in trained),
        "extra_logs": {"turns": len(trained), "left_out_tokens": left_out, **outcome.extra_logs},
    }


# OpenRLHF requires a subclass of its own class, and is installed only in a trainer
with contextlib.suppress(ImportError):
    importlib.import_module("openrlhf.utils.agent").AgentExecutorBase.register(AgentExecutor)
