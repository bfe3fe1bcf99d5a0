"""Resume turns that the engine aborted, for example for a weight update: send the prompt again,
followed by the tokens sampled so far.

Each token keeps the version of the weights that sampled it. If a grammar constrains a turn
(`json_schema`, `regex` ...), the turn is resumed only if it has no tokens yet, because the grammar
starts again with each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from toolroll.rollout.engine.engine_client import EngineClient
from toolroll.rollout.engine.stream import Progress
from toolroll.rollout.types import (
    Completion,
    ExpertArray,
    GenerateRequest,
    IdArray,
    WeightVersion,
)

_BACKOFF = 0.1
_BACKOFF_LIMIT = 5.0
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


async def generate_resumed(
    engine: EngineClient,
    request: GenerateRequest,
    *,
    max_resumes: int,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    progress: Progress | None = None,
) -> Completion:
    """Sample a turn. If the engine aborts it, resume it at most `max_resumes` times.

    The joined completion has finish_reason "abort" if the last attempt was aborted too, or if a
    grammar prevents a resume. `max_new_tokens` and `min_new_tokens` apply to all parts together.
    """
    whole = await engine.generate(request, progress=progress)
    limit = int(request.sampling_params.get("max_new_tokens", 0))
    for resume in range(max_resumes):
        left = limit - len(whole.output_ids)
        if (
            whole.finish_reason != "abort"
            or left <= 0
            or (len(whole.output_ids) and _constrained(request.sampling_params))
        ):
            break
        await sleep(min(_BACKOFF * 2**resume, _BACKOFF_LIMIT))
        part = await engine.generate(
            GenerateRequest(
                np.concatenate([request.input_ids, whole.output_ids]),
                _rest(request.sampling_params, left, len(whole.output_ids)),
                request.session_id,
                return_logprob=request.return_logprob,
                extra=request.extra,
                routed_experts_start=len(request.input_ids) + len(whole.output_ids) - 1
                if len(whole.output_ids)
                else request.routed_experts_start,
            ),
            progress=_after(progress, whole.output_ids),
        )
        whole = join(whole, part)
    return whole


def _constrained(params: Mapping[str, Any]) -> bool:
    return any(params.get(name) for name in _GRAMMARS)


def _rest(params: Mapping[str, Any], left: int, sampled: int) -> dict[str, Any]:
    """Return `params` for the rest of a turn that already has `sampled` tokens and may get at most
    `left` more.
    """
    least = params.get("min_new_tokens")
    return {**params, "max_new_tokens": left} | (
        {"min_new_tokens": max(least - sampled, 0)} if least else {}
    )


def _after(progress: Progress | None, before: IdArray) -> Progress | None:
    return None if progress is None else lambda ids: progress([*before.tolist(), *ids])


def join(first: Completion, second: Completion) -> Completion:
    """Join two parts of one turn into one completion."""
    shift = len(first.output_ids)
    moved = (
        WeightVersion(span.version, span.start + shift, span.stop + shift)
        for span in second.weight_versions
    )
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = np.concatenate([first.logprobs, second.logprobs])
    return replace(
        second,
        output_ids=np.concatenate([first.output_ids, second.output_ids]),
        logprobs=logprobs,
        text=first.text + second.text,
        weight_versions=_merged([*first.weight_versions, *moved]),
        prompt_tokens=first.prompt_tokens or max(second.prompt_tokens - shift, 0),
        cached_tokens=first.cached_tokens,
        latency=first.latency + second.latency,
        attempts=first.attempts + second.attempts,
        top_logprobs=[*first.top_logprobs, *second.top_logprobs]
        if first.top_logprobs and second.top_logprobs
        else None,
        routed_experts=_joined_experts(first, second),
    )


def _joined_experts(first: Completion, second: Completion) -> ExpertArray | None:
    """Return the experts of both parts: those of the second part follow those of the first."""
    before, after = first.routed_experts, second.routed_experts
    if not len(first.output_ids) or not len(second.output_ids):
        return before if len(first.output_ids) else after
    if before is None or after is None:
        return None
    return np.concatenate([before, after])


def _merged(spans: list[WeightVersion]) -> tuple[WeightVersion, ...]:
    merged: list[WeightVersion] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = WeightVersion(span.version, merged[-1].start, span.stop)
        else:
            merged.append(span)
    return tuple(merged)
