"""Resume turns that the engine aborted, for example for a weight update: send the prompt again,
followed by the tokens sampled so far.

Each token keeps the version of the weights that sampled it. A turn with a grammar (`json_schema`,
`regex` ...) or a stop string (`stop`, `stop_regex`) is resumed only if it has no tokens yet: the
grammar starts again with each request, and the engine looks for a stop string only in the tokens
that this request sampled. An abort does not change a turn that has a stop token or all its
tokens: it is complete. With speculative decoding, tokens may follow the stop token of an aborted
answer. They are dropped.

A turn is cut before its first placeholder token, which stands for an image, a video or audio. A
prompt with such a token and without its image makes trainers fail (verl#7515).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import replace
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from toolroll.rollout.engine.stream import Progress
from toolroll.rollout.types import Completion, ExpertArray, GenerateRequest, IdArray, WeightVersion

_BACKOFF = 0.1
_BACKOFF_LIMIT = 5.0
_FROM_THE_START = ("json_schema", "regex", "ebnf", "structural_tag", "stop", "stop_regex")
"""The parameters that the engine applies to the sampled tokens from the first one on."""


class Generates(Protocol):
    """An `EngineClient`, or what stands before one."""

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Sample one turn, or the part of it until an abort."""
        ...

    def stopped(self) -> bool:
        """Return True while the trainer lets the running episode start no turn."""
        ...


class Parking(Protocol):
    """Where the running episode waits after an abort, until its trainer continues it."""

    async def wait(self, request: GenerateRequest, turn: Completion) -> bool:
        """Wait until the aborted `turn` may be resumed. Return False if it must not be."""
        ...

    def sampled(self, request: GenerateRequest, turn: Completion) -> None:
        """Take note of a turn that is complete."""
        ...


PARKING: ContextVar[Parking | None] = ContextVar("toolroll_parking", default=None)
"""The place where the running episode waits. None: it ends with the abort."""


async def generate_resumed(
    engine: Generates,
    request: GenerateRequest,
    *,
    max_resumes: int,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    progress: Progress | None = None,
    placeholders: Collection[int] = (),
) -> Completion:
    """Sample a turn. If the engine aborts it, resume it at most `max_resumes` times. After that, or
    if the trainer has stopped, wait in `PARKING` and then resume it.

    The joined completion has finish_reason "abort" if the last attempt was aborted too, or if a
    grammar or stop string prevents a resume. `max_new_tokens` and `min_new_tokens` apply to all
    parts together. The completion is cut before the first of `placeholders` (`cut_placeholder`).
    """
    parking, params, resumes = PARKING.get(), request.sampling_params, 0
    progress = _before(progress, placeholders)
    turn = await engine.generate(request, progress=progress)
    joined = cut_placeholder(_ended(turn, params), placeholders)
    while _may_resume(joined, params):
        if resumes < max_resumes and not engine.stopped():
            await sleep(min(_BACKOFF * 2**resumes, _BACKOFF_LIMIT))
            resumes += 1
        elif parking is None or not await parking.wait(request, joined):
            break
        part = await engine.generate(
            GenerateRequest(
                np.concatenate([request.input_ids, joined.output_ids]),
                _rest(params, len(joined.output_ids)),
                request.session_id,
                return_logprob=request.return_logprob,
                extra=request.extra,
                images=request.images,
                routed_experts_start=len(request.input_ids) + len(joined.output_ids) - 1
                if len(joined.output_ids)
                else request.routed_experts_start,
            ),
            progress=_after(progress, joined.output_ids),
        )
        joined = cut_placeholder(_ended(join(joined, part), params), placeholders)
    if parking is not None:
        parking.sampled(request, joined)
    return joined


def cut_placeholder(turn: Completion, placeholders: Collection[int]) -> Completion:
    """Return `turn` up to its first placeholder token, without this token. If there is one, the
    finish_reason is "length", and `matched` is the token.
    """
    for position, index in enumerate(turn.output_ids.tolist() if placeholders else ()):
        if index in placeholders:
            return replace(_cut(turn, position), finish_reason="length", matched=index)
    return turn


def is_cut(turn: Completion) -> bool:
    """Return True if `cut_placeholder` cut the turn."""
    return turn.finish_reason == "length" and turn.matched is not None


def _ended(turn: Completion, params: Mapping[str, Any]) -> Completion:
    """Return `turn`. If it was aborted, but one of its tokens ends it, return it up to this token,
    with the finish_reason that it would have without the abort: SGLang checks for an abort first.
    """
    if turn.finish_reason != "abort" or not len(turn.output_ids):
        return turn
    if not params.get("ignore_eos"):
        stops = np.flatnonzero(np.isin(turn.output_ids, list(params.get("stop_token_ids") or ())))
        if len(stops):
            matched = int(turn.output_ids[stops[0]])
            return replace(_cut(turn, int(stops[0]) + 1), finish_reason="stop", matched=matched)
    if len(turn.output_ids) >= params.get("max_new_tokens", np.inf):
        return replace(turn, finish_reason="length")
    return turn


def _cut(turn: Completion, count: int) -> Completion:
    """Return `turn` with its first `count` tokens. Its text, which is for logs, keeps the rest."""
    experts = turn.routed_experts
    return replace(
        turn,
        output_ids=turn.output_ids[:count],
        logprobs=None if turn.logprobs is None else turn.logprobs[:count],
        weight_versions=tuple(
            WeightVersion(span.version, span.start, min(span.stop, count))
            for span in turn.weight_versions
            if span.start < count
        ),
        routed_experts=None
        if experts is None
        else experts[: len(experts) - (len(turn.output_ids) - count)],
        top_logprobs=None if turn.top_logprobs is None else turn.top_logprobs[:count],
    )


def _may_resume(turn: Completion, params: Mapping[str, Any]) -> bool:
    if turn.finish_reason != "abort" or "max_new_tokens" not in params:
        return False
    return not len(turn.output_ids) or not any(params.get(name) for name in _FROM_THE_START)


def _rest(params: Mapping[str, Any], sampled: int) -> dict[str, Any]:
    """Return `params` for the rest of a turn that already has `sampled` tokens."""
    least = params.get("min_new_tokens")
    return {**params, "max_new_tokens": params["max_new_tokens"] - sampled} | (
        {"min_new_tokens": max(least - sampled, 0)} if least else {}
    )


def _after(progress: Progress | None, before: IdArray) -> Progress | None:
    return None if progress is None else lambda ids: progress([*before.tolist(), *ids])


def _before(progress: Progress | None, placeholders: Collection[int]) -> Progress | None:
    """Return a `progress` that gets the ids before the first placeholder token."""
    if progress is None or not placeholders:
        return progress
    return lambda ids: progress(list(takewhile(lambda index: index not in placeholders, ids)))


def join(first: Completion, second: Completion) -> Completion:
    """Join two parts of one turn into one completion."""
    shift = len(first.output_ids)
    if not shift:  # the first request was aborted before the engine sampled anything
        return replace(
            second,
            latency=first.latency + second.latency,
            attempts=first.attempts + second.attempts,
        )
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
        other_prompt=first.other_prompt or second.other_prompt,
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
