"""`SkyrlEngine`: uses SkyRL's inference engine client as the engine of a `Model`."""

from __future__ import annotations

from typing import Any

from toolroll.rollout.adapters.framework_engine import FrameworkEngine, Sampled, to_vllm
from toolroll.rollout.types import GenerateRequest, WeightVersion


class SkyrlEngine(FrameworkEngine):
    """SkyRL's inference engine client as an `EngineClient`.

    `client` is SkyRL's `InferenceEngineInterface`. If `cache_salt` is True and the client reports
    its weight version, a request never uses prefix cache entries of another version (like SkyRL's
    `use_cache_salt`). `model` is the engine's name for the policy's weights; None selects the
    engine's default.
    """

    def __init__(
        self,
        client: Any,
        *,
        context_length: int | None,
        vocab_size: int,
        cache_salt: bool = True,
        model: str | None = None,
    ) -> None:
        super().__init__("SkyRL", context_length=context_length, vocab_size=vocab_size)
        self._client = client
        self._cache_salt = cache_salt
        self._model = {} if model is None else {"model": model}

    async def sample(self, request: GenerateRequest) -> Sampled:
        """Sample one turn. Raise `UsageError` for a sampling parameter that vLLM does not have."""
        params = to_vllm(request.sampling_params, name="SkyRL's engine")
        before = self._version()
        batch: dict[str, Any] = {
            "prompts": None,
            "prompt_token_ids": [request.input_ids.tolist()],
            "sampling_params": {**params, "logprobs": 1},
            "session_ids": [request.session_id],
        }
        if self._cache_salt and before is not None:
            model = f"{self._model['model']}@" if self._model else ""
            batch["cache_salt"] = f"toolroll-{model}{before}"
        answer = await self._client.generate(batch, **self._model)
        ids = answer["response_ids"][0]
        logprobs = answer.get("response_logprobs")
        versions: tuple[WeightVersion, ...] = ()
        if before is not None and before == self._version() and ids:
            versions = (WeightVersion(before, 0, len(ids)),)
        return Sampled(
            ids, logprobs[0] if logprobs else None, str(answer["stop_reasons"][0]), versions
        )

    def _version(self) -> str | None:
        """Return the engine's weight version, or None if the client does not report it."""
        version = getattr(self._client, "weight_version", None)
        return None if version is None else str(version)
