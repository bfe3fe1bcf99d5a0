"""`ArealEngine`: uses AReaL's inference engine as the engine of a `Model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import groupby
from typing import Any

from toolroll.rollout.adapters.framework_engine import TEXT_ONLY, FrameworkEngine, Sampled
from toolroll.rollout.errors import CompletionError, UsageError
from toolroll.rollout.types import GenerateRequest, WeightVersion

NAMES = (
    "max_new_tokens min_new_tokens temperature top_p top_k stop stop_token_ids ignore_eos "
    "frequency_penalty"
).split()
"""The fields of `GenerationHyperparameters` that are set for each turn."""


class ArealEngine(FrameworkEngine):
    """AReaL's inference engine as an `EngineClient`.

    `engine` is AReaL's `InferenceEngine`. `gconfig` is AReaL's `GenerationHyperparameters`.
    """

    def __init__(
        self, engine: Any, gconfig: Any, tokenizer: Any, *, context_length: int | None
    ) -> None:
        super().__init__("AReaL", context_length=context_length, vocab_size=len(tokenizer))
        self._engine = engine
        self._gconfig = gconfig
        self._tokenizer = tokenizer

    async def sample(self, request: GenerateRequest) -> Sampled:
        """Sample one turn. Raise `UsageError` for a sampling parameter that AReaL does not have.

        All turns of an episode have the same `rid`, so that AReaL sends them to the same server.
        """
        params = _known(request.sampling_params)
        answer = await self._engine.agenerate(
            import_module("areal.api").ModelRequest(
                rid=request.session_id,
                input_ids=request.input_ids.tolist(),
                gconfig=self._gconfig.new(n_samples=1, **params),
                tokenizer=self._tokenizer,
            )
        )
        ids = list(answer.output_tokens)
        if len(answer.output_versions) != len(ids):
            raise CompletionError(
                f"AReaL's engine gave {len(answer.output_versions)} weight versions for "
                f"{len(ids)} sampled ids"
            )
        reason = "stop" if answer.stop_reason == "tool_calls" else str(answer.stop_reason)
        return Sampled(ids, list(answer.output_logprobs), reason, _spans(answer.output_versions))


def _known(params: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in params.items() if name not in TEXT_ONLY}
    for name in given:
        if name not in NAMES:
            raise UsageError(f"AReaL's engine has no sampling parameter {name!r}: leave it out")
    return given | {"greedy": given.get("temperature") == 0}


def _spans(versions: Sequence[int]) -> tuple[WeightVersion, ...]:
    spans, start = [], 0
    for version, group in groupby(versions):
        stop = start + len(list(group))
        spans.append(WeightVersion(str(version), start, stop))
        start = stop
    return tuple(spans)
