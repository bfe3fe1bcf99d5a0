"""`AgentExecutor`: plays one sample of OpenRLHF with any program that uses `openai.AsyncOpenAI`.

Invariants: the agent's requests are answered in the caller's event loop, without a server or port.
Samples share no mutable state. If the context overflows, the sample is truncated and keeps its
earlier turns.
"""

from __future__ import annotations

import contextlib
import importlib
import uuid
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from openai import BadRequestError

from toolroll.endpoint.endpoint import Endpoint
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.in_process.client import ToolrollClient
from toolroll.parsers.registry import get_parser
from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runtime.jsonable import finite, shown
from toolroll.rollout.session.session import check_trained_logprobs
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.chat_template import HistoryPolicy
from toolroll.rollout.types import Trajectory
from toolroll.trainers.openrlhf.vllm_engine import LlmEngine, VllmEngine
from toolroll.trainers.sequences import share_of, warn_of_left_out


@dataclass(frozen=True, slots=True)
class _Sample:
    """The arguments of one call of `execute`, and the client for this call."""

    client: ToolrollClient
    model_name: str
    sampling_params: Any
    max_length: int
    hf_tokenizer: Any
    llm_engine: LlmEngine


_SAMPLE: ContextVar[_Sample] = ContextVar("toolroll_openrlhf_sample")


def _of_sample(name: str) -> Any:
    """Return a property with the value of `name` in the running sample."""

    def value(executor: AgentExecutor) -> Any:
        try:
            return getattr(_SAMPLE.get(), name)
        except LookupError:
            raise UsageError(f"AgentExecutor.{name} exists only while run_agent runs") from None

    return property(value)


class AgentExecutor:
    """Plays OpenRLHF's samples with an agent. Write a subclass that is also named `AgentExecutor`
    and overrides `run_agent`. Pass its file as `--train.agent_func_path`.

    `parser` is SGLang's name for the model's tool-call format. OpenRLHF takes one sequence per
    sample, which `choose` selects. With `history` "scaffold" or "preserve", fewer samples fork.

    Example:
        class AgentExecutor(toolroll.trainers.openrlhf.AgentExecutor):
            async def run_agent(self, prompt, label, session_id):
                messages = [{"role": "user", "content": prompt}]
                reply = await self.client.chat.completions.create(
                    model=self.model_name, messages=messages
                )
                return {"reward": float(label in reply.choices[0].message.content)}
    """

    parser = "hermes"
    history: ClassVar[HistoryPolicy] = "fork"
    log_defaults: ClassVar[Mapping[str, float]] = {}
    """The names in `extra_logs` that OpenRLHF gets, and the value of each for a sample that does
    not return it. OpenRLHF needs the same names for all samples, so other names are left out.
    """
    overflow_reward: ClassVar[float | None] = 0.0
    """The reward of a sample whose context overflowed. Set None if a reward model gives the
    rewards, because OpenRLHF needs a reward for all samples or for none.
    """

    def __init__(self) -> None:
        self._templates: WeakKeyDictionary[Any, ChatTemplate] = WeakKeyDictionary()

    async def run_agent(self, prompt: Any, label: Any, session_id: str) -> Any:
        """Play one sample with `self.client` and return its reward.

        Return a number, None if a reward model gives the rewards, or a dict. The dict may have
        `reward`, `scores` (by which OpenRLHF filters samples; default: the reward) and `extra_logs`
        (numbers, whose names are in `log_defaults`). OpenRLHF gets floats. All requests of
        `self.client` belong to the session `session_id`. The default implementation plays a single
        turn without a reward: `prompt` is the user's message, or the list of messages.
        """
        messages: Any = (
            prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        )
        await self.client.chat.completions.create(model=self.model_name, messages=messages)
        return {}

    # --- what `run_agent` may use: the values of the running sample -------------------------------

    client: ToolrollClient = _of_sample("client")
    """The client of the running sample, an `openai.AsyncOpenAI`."""
    model_name: str = _of_sample("model_name")
    """The name of the model, for requests of `client`."""
    sampling_params: Any = _of_sample("sampling_params")
    """The trainer's sampling parameters of the running sample."""
    max_length: int = _of_sample("max_length")
    """The limit of the prompt and the responses together, in tokens, for the running sample."""
    hf_tokenizer: Any = _of_sample("hf_tokenizer")
    """The trainer's tokenizer."""
    llm_engine: LlmEngine = _of_sample("llm_engine")
    """The trainer's engine."""

    # --- what OpenRLHF calls ----------------------------------------------------------------------

    def choose(self, trajectories: Sequence[Trajectory]) -> Trajectory:
        """Return the sequence to train on: the one with the most trained tokens. There are several
        sequences if the agent has sub-agents or the session forked. The trained tokens of the other
        sequences are counted in `extra_logs["left_out_tokens"]`.
        """
        return max(trajectories, key=lambda trajectory: trajectory.trained_tokens)

    async def execute(
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LlmEngine,
        images: Any = None,
    ) -> Any:
        """Play one sample for OpenRLHF 0.11 and return its result dict.

        If the first prompt leaves no room for an answer, its first tokens are dropped, as in
        OpenRLHF's own executors. `rollout_log_probs` is None if the trainer requests no logprobs.
        Raise `UsageError` for images, and if the result of `run_agent` has a wrong type.
        """
        if images:
            raise UsageError(
                "images are not supported: the chat template's text does not have their tokens"
            )
        template = self._template(hf_tokenizer)
        engine = VllmEngine(llm_engine, hf_tokenizer, sampling_params, max_length=max_length)
        model = Model(
            engine, template, get_parser(self.parser, hf_tokenizer.get_added_vocab()), threads=1
        )
        most = sampling_params.max_tokens
        defaults = {} if most is None else {"max_new_tokens": most}
        endpoint = Endpoint(model, EndpointSettings(sampling_params=defaults), openrlhf=True)
        session_id = f"openrlhf-{uuid.uuid4().hex}"
        client = ToolrollClient(endpoint, session=session_id)
        sample = _Sample(
            client, endpoint.model_name, sampling_params, max_length, hf_tokenizer, llm_engine
        )
        token = _SAMPLE.set(sample)
        try:
            await endpoint.start()
            outcome, overflow = await self._played(prompt, label, session_id)
            trajectories = await client.trajectories()
        finally:
            _SAMPLE.reset(token)
            await endpoint.aclose()
            model.release()
        if not trajectories:
            raise RolloutError(
                "run_agent ended without a reply of the model: there is nothing to train on"
            )
        chosen = self.choose(trajectories)
        trained = sum(trajectory.trained_tokens for trajectory in trajectories)
        left_out = trained - chosen.trained_tokens
        if left_out:
            warn_of_left_out(left_out, trained)
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "mm_train_inputs": None,
            **_result(
                chosen,
                outcome,
                left_out,
                overflow=overflow,
                logprobs=sampling_params.logprobs is not None,
            ),
        }

    async def _played(
        self, prompt: Any, label: Any, session_id: str
    ) -> tuple[Mapping[str, Any], bool]:
        try:
            returned = await self.run_agent(prompt, label, session_id)
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return _outcome(self.overflow_reward, self.log_defaults), True
        return _outcome(returned, self.log_defaults), False

    def _template(self, tokenizer: Any) -> ChatTemplate:
        """Return the chat template of `tokenizer`. All samples get the same object, and so share
        its cache.
        """
        if tokenizer not in self._templates:
            self._templates[tokenizer] = ChatTemplate(tokenizer, history=self.history)
        return self._templates[tokenizer]


_OUTCOME = ("reward", "scores", "extra_logs")


def _outcome(returned: Any, log_defaults: Mapping[str, float]) -> dict[str, Any]:
    """Return the result of `run_agent` as a dict with all keys of `_OUTCOME`, and all numbers as
    floats. Raise `UsageError` if the result is not valid.
    """
    if not isinstance(returned, Mapping):
        if returned is not None and finite(returned) is None:
            raise UsageError(
                f"run_agent returned {type(returned).__name__}: return a finite number, None, or a "
                f"dict with the keys {', '.join(_OUTCOME)}"
            )
        returned = {"reward": returned}
    returned = _known("keys", returned, _OUTCOME, f"a result has {', '.join(_OUTCOME)}")
    reward, scores = (_number(name, returned.get(name)) for name in ("reward", "scores"))
    logs = returned.get("extra_logs", {})
    if not isinstance(logs, Mapping):
        raise UsageError(f"run_agent returned the extra_logs {shown(logs)}: they must be a dict")
    advice = "OpenRLHF needs the same names for all samples, so declare them in log_defaults"
    logs = _known("extra_logs", logs, log_defaults, advice)
    numbers = {name: _number(f"extra_logs[{name!r}]", value) for name, value in logs.items()}
    return {
        "reward": reward,
        "scores": reward if scores is None else scores,
        "extra_logs": {
            **{name: float(value) for name, value in log_defaults.items()},
            **{name: value for name, value in numbers.items() if value is not None},
        },
    }


def _known(
    kind: str, values: Mapping[Any, Any], names: Collection[str], advice: str
) -> dict[str, Any]:
    """Return the items of `values` that are in `names`. Warn of the others: they are left out, as
    in the published executor.
    """
    unknown = ", ".join(sorted(str(name) for name in values if name not in names))
    if unknown:
        warnings.warn(
            f"run_agent returned a dict whose {kind} {unknown} are left out: {advice}",
            RuntimeWarning,
            stacklevel=2,
        )
    return {name: values[name] for name in names if name in values}


def _number(name: str, value: Any) -> float | None:
    number = finite(value)
    if number is None and value is not None:
        raise UsageError(
            f"run_agent returned the {name} {shown(value)}: it must be a finite number or None"
        )
    return number


def _result(
    chosen: Trajectory,
    outcome: Mapping[str, Any],
    left_out: int,
    *,
    overflow: bool,
    logprobs: bool,
) -> dict[str, Any]:
    trained = [turn for turn in chosen.turns if turn.excluded is None]
    mask = chosen.loss_mask.astype(bool)
    if logprobs:
        check_trained_logprobs(chosen.logprobs, mask)
    counts = {
        "turns": float(len(trained)),
        "left_out_tokens": float(left_out),
        "delivered_share": share_of(chosen.trained_tokens, left_out),
    }
    return {
        **outcome,
        "observation_tokens": chosen.input_ids.tolist(),
        "action_ranges": [(turn.start, turn.stop) for turn in trained],
        "rollout_log_probs": np.where(mask, chosen.logprobs, 0.0).tolist() if logprobs else None,
        "truncated": overflow or any(turn.finish_reason == "length" for turn in trained),
        "extra_logs": {**counts, **outcome["extra_logs"]},
    }


# OpenRLHF requires a subclass of its own class, but is installed only in a trainer
with contextlib.suppress(ImportError):
    importlib.import_module("openrlhf.utils.agent").AgentExecutorBase.register(AgentExecutor)
