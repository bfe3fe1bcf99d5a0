"""`ServerEngine`: verl's `server_manager` as the engine of a `Model`.

Invariants: every turn has its logprobs; the session is the request id, so that verl keeps an
episode at one server; a parameter that the server does not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from toolroll.rollout.engine import EngineClient, ModelInfo, Progress
from toolroll.rollout.errors import CompletionError, UsageError
from toolroll.rollout.types import Completion, GenerateRequest, WeightVersion

_VLLM = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    **{
        name: name
        for name in (
            "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty "
            "stop stop_token_ids ignore_eos"
        ).split()
    },
}
"""SGLang's name -> vLLM's."""
_TEXT_ONLY = frozenset({"no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"})
"""They only shape the text, and verl returns none."""
_REASONS = {"aborted": "abort", "abort": "abort", "length": "length", "stop": "stop"}
"""verl passes SGLang's reasons on; of vLLM's it makes "aborted" and "completed"."""


class ServerManager(Protocol):
    """What verl 0.9.1 gives an agent loop as `server_manager` (`LLMServerClient`)."""

    async def generate(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        """verl's `TokenOutput`."""
        ...


class ServerEngine(EngineClient):
    """`backend` is verl's `rollout.name`; `context_length` is of prompt and response together."""

    def __init__(
        self, server_manager: ServerManager, *, backend: str, context_length: int, vocab_size: int
    ) -> None:
        if backend not in ("sglang", "vllm"):
            raise UsageError(
                f"actor_rollout_ref.rollout.name={backend}: the agent loop needs sglang or vllm"
            )
        self._manager = server_manager
        self._backend = backend
        self._info = ModelInfo(context_length=context_length, vocab_size=vocab_size)

    @property
    def url(self) -> str:
        """A name: the addresses are verl's."""
        return "verl"

    async def model_info(self) -> ModelInfo:
        """Return the lengths of verl's configuration."""
        return self._info

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Return one turn.

        Raise `CompletionError` if a logprob is missing or nothing was sampled, `UsageError` for a
        sampling parameter that the server does not have.
        """
        params = self._sampling(request)
        began = perf_counter()
        answer = await self._manager.generate(
            request.session_id, prompt_ids=request.input_ids.tolist(), sampling_params=params
        )
        ids = [int(one) for one in answer.token_ids]
        logprobs = answer.log_probs or []
        if len(logprobs) != len(ids):
            raise CompletionError(f"verl gave {len(logprobs)} logprobs for {len(ids)} sampled ids")
        reason, matched = _finish(answer.stop_reason, ids, request.sampling_params)
        if not ids and reason != "abort":
            raise CompletionError(f"verl gave no tokens, and the stop reason {answer.stop_reason}")
        if progress is not None:
            progress(list(ids))
        return Completion(
            output_ids=np.array(ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            finish_reason=reason,
            matched=matched,
            weight_versions=_versions(answer.extra_fields, len(ids)),
            prompt_tokens=len(request.input_ids),
            cached_tokens=int(answer.extra_fields.get("num_cached_tokens") or 0),
            latency=perf_counter() - began,
        )

    async def post(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Raise `UsageError`: there is no HTTP."""
        raise UsageError("verl's server manager has no HTTP address: call generate, not post")

    async def aclose(self) -> None:
        """Do nothing: the servers are verl's."""

    def _sampling(self, request: GenerateRequest) -> dict[str, Any]:
        given = {
            name: value for name, value in request.sampling_params.items() if name not in _TEXT_ONLY
        }
        if self._backend == "vllm":
            unknown = next((name for name in given if name not in _VLLM), None)
            if unknown is not None:
                raise UsageError(f"vLLM has no sampling parameter {unknown!r}: leave it out")
            given = {_VLLM[name]: value for name, value in given.items()}
        return {**given, "logprobs": True}


def _finish(
    stop_reason: str | None, ids: list[int], asked: Mapping[str, Any]
) -> tuple[str, int | None]:
    """Return why a turn ended, and the token that ended it.

    "completed" and None say only that the turn was not aborted: the last token tells the rest.
    """
    stopped = bool(ids) and ids[-1] in set(asked.get("stop_token_ids") or ())
    reason = _REASONS.get(stop_reason or "")
    if reason is None:
        full = len(ids) >= int(asked["max_new_tokens"])
        reason = "length" if full and not stopped else "stop"
    return reason, ids[-1] if reason == "stop" and ids else None


def _versions(extra: Mapping[str, Any], count: int) -> tuple[WeightVersion, ...]:
    """Return the step of the weights; "2-3" if verl resumed the turn after an update, and so does
    not report which token is of which.
    """
    first, last = extra.get("min_global_steps"), extra.get("max_global_steps")
    if first is None or last is None:
        first = last = extra.get("global_steps")
    if first is None or not count:
        return ()
    version = str(first) if first == last else f"{first}-{last}"
    return (WeightVersion(version, 0, count),)
