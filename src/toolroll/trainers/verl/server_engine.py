"""`ServerEngine`: uses verl's `server_manager` as the engine of a `Model`.

Invariants: every turn is requested with logprobs. The session id is verl's request id, so that verl
keeps an episode on one server. If the server is vLLM, a sampling parameter that vLLM does not have
is refused, and the error names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from toolroll.rollout.errors import CompletionError, UsageError
from toolroll.rollout.types import GenerateRequest, WeightVersion
from toolroll.trainers.framework_engine import (
    TEXT_ONLY,
    VLLM_NAMES,
    FrameworkEngine,
    Sampled,
    renamed,
)

_FINISH_REASONS = {"aborted": "abort", "abort": "abort", "length": "length", "stop": "stop"}
"""verl passes SGLang's reasons on, and converts vLLM's reasons to "aborted" and "completed"."""


class ServerManager(Protocol):
    """The `server_manager` of an agent loop in verl 0.9.1 (`LLMServerClient`)."""

    async def generate(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        """Return verl's `TokenOutput`."""
        ...


class ServerEngine(FrameworkEngine):
    """An engine that sends requests to verl's server manager.

    `backend` is verl's `rollout.name`. `context_length` is the limit of the prompt and the response
    together, in tokens.
    """

    def __init__(
        self, server_manager: ServerManager, tokenizer: Any, *, backend: str, context_length: int
    ) -> None:
        super().__init__("verl", tokenizer, context_length=context_length)
        if backend not in ("sglang", "vllm"):
            raise UsageError(
                f"actor_rollout_ref.rollout.name={backend}: the agent loop needs sglang or vllm"
            )
        self._manager = server_manager
        self._backend = backend

    async def sample(self, request: GenerateRequest) -> Sampled:
        """Sample one turn.

        Raise `CompletionError` if nothing was sampled and the turn was not aborted. Raise
        `UsageError` for a sampling parameter that vLLM does not have, if the server is vLLM.
        """
        answer = await self._manager.generate(
            request.session_id,
            prompt_ids=request.input_ids.tolist(),
            sampling_params=self._sampling(request),
        )
        ids = [int(token) for token in answer.token_ids]
        reason = _finish(answer.stop_reason, ids, request.sampling_params)
        if not ids and reason != "abort":
            raise CompletionError(
                f"verl gave no tokens, although its stop reason is {answer.stop_reason}"
            )
        return Sampled(
            ids,
            answer.log_probs,
            reason,
            _versions(answer.extra_fields, len(ids)),
            cached_tokens=int(answer.extra_fields.get("num_cached_tokens") or 0),
            routed_experts=answer.routed_experts,
        )

    def _sampling(self, request: GenerateRequest) -> dict[str, Any]:
        requested = request.sampling_params
        if self._backend == "vllm":
            params = renamed(requested, VLLM_NAMES, engine="vLLM")
        else:  # verl does not return the text
            params = {name: value for name, value in requested.items() if name not in TEXT_ONLY}
        return params | {"logprobs": True}


def _finish(stop_reason: str | None, ids: Sequence[int], params: Mapping[str, Any]) -> str:
    """Return the finish reason of a turn.

    "completed" and None mean only that the turn was not aborted. In this case the length and the
    last token decide between "length" and "stop".
    """
    reason = _FINISH_REASONS.get(stop_reason or "")
    if reason is not None:
        return reason
    stopped = bool(ids) and ids[-1] in set(params.get("stop_token_ids") or ())
    return "length" if len(ids) >= int(params["max_new_tokens"]) and not stopped else "stop"


def _versions(extra: Mapping[str, Any], count: int) -> tuple[WeightVersion, ...]:
    """Return one span for the turn. Its weight version is the training step of the weights. If verl
    updated the weights during the turn, the version is a range such as "2-3", because verl does not
    report which weights sampled which tokens.
    """
    first, last = extra.get("min_global_steps"), extra.get("max_global_steps")
    if first is None or last is None:
        first = last = extra.get("global_steps")
    if first is None or not count:
        return ()
    version = str(first) if first == last else f"{first}-{last}"
    return (WeightVersion(version, 0, count),)
