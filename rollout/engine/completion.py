"""SGLang's answer to `/generate` -> a checked `Completion`.

Invariants: ids and logprobs are aligned one to one; their number is what the engine counted; no logprob is NaN or above zero; the
weight versions cover the sampled tokens. What does not hold raises `CompletionError`: nothing is mended.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from struct import error as StructError
from struct import pack_into
from typing import Any

import numpy as np

from toolroll.rollout.errors import CompletionError
from toolroll.rollout.types import Completion, GenerateRequest, IdArray, LogprobArray, WeightVersion

_OBJECT = (dict, Mapping)  # what is a dict is found to be one without a call
_ABOVE_ZERO = 1e-3  # bf16 rounding of a log-softmax may end a hair above 0


def parse_completion(
    body: Mapping[str, Any],
    request: GenerateRequest,
    *,
    latency: float = 0.0,
    attempts: int = 1,
    rid: str = "",
) -> Completion:
    """The completion in `body`, the JSON object of one answer to `request`; `CompletionError` where there is none."""
    try:
        return _parsed(body, request, latency=latency, attempts=attempts, rid=rid)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CompletionError(f"the engine's answer cannot be read: {error}: {str(body)[:300]}") from error


def _parsed(body: Mapping[str, Any], request: GenerateRequest, *, latency: float, attempts: int, rid: str) -> Completion:
    if not isinstance(body, _OBJECT) or "output_ids" not in body or not isinstance(body.get("meta_info"), _OBJECT):
        raise CompletionError(f"the engine's answer has no output_ids and meta_info: {str(body)[:300]}")
    meta: Mapping[str, Any] = body["meta_info"]
    sampled = () if body["output_ids"] is None else body["output_ids"]
    output_ids = _ids(sampled)
    finish = meta.get("finish_reason")
    if not isinstance(finish, _OBJECT) or "type" not in finish:
        raise CompletionError(f"the engine's answer has no finish_reason: {finish!r}")
    _check_counts(meta, len(output_ids), len(request.input_ids))
    return Completion(
        output_ids=output_ids,
        logprobs=_logprobs(meta, sampled) if request.return_logprob else None,
        finish_reason=str(finish["type"]),
        matched=finish.get("matched"),
        text=str(body.get("text") or ""),
        weight_versions=_weight_versions(meta, len(output_ids)),
        prompt_tokens=int(meta.get("prompt_tokens") or len(request.input_ids)),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        latency=latency,
        attempts=attempts,
        rid=rid,
        routed_experts=_routed_experts(meta, len(request.input_ids) + len(output_ids) - 1),
        top_logprobs=_top_logprobs(meta, len(output_ids)),
    )


def _top_logprobs(meta: Mapping[str, Any], sampled: int) -> tuple[tuple[tuple[float, int], ...], ...] | None:
    places = meta.get("output_top_logprobs")
    if not places:
        return None
    if len(places) != sampled:
        raise CompletionError(f"{sampled} sampled ids came with {len(places)} lists of top logprobs")
    return tuple(tuple((float(item[0]), int(item[1])) for item in place or ()) for place in places)


def _routed_experts(meta: Mapping[str, Any], tokens: int) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """The experts of the first `tokens` tokens: base64 of int32 [tokens, layers, top_k] (SGLang 0.5.23, io_struct)."""
    encoded = meta.get("routed_experts")
    if not encoded:
        return None
    try:
        flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.int32)
        return flat.reshape(tokens, -1)
    except (ValueError, TypeError) as error:
        raise CompletionError(f"the engine's routed_experts are no base64 of int32 for {tokens} tokens: {error}") from error


def _check_counts(meta: Mapping[str, Any], sampled: int, prompt: int) -> None:
    counted = meta.get("completion_tokens")
    if counted is not None and counted != sampled:
        raise CompletionError(f"the engine counts {counted} sampled tokens and sent {sampled} output_ids")
    read = meta.get("prompt_tokens")
    if read is not None and read != prompt:
        raise CompletionError(f"the engine read a prompt of {read} tokens where {prompt} were sent")


def _ids(given: Any) -> IdArray:
    """`given`, a list of integers; packed by `struct`, which takes half of what numpy or an `array` takes."""
    try:
        ids = np.empty(len(given), dtype=np.intc)
        pack_into(f"{len(given)}i", ids.data, 0, *given)
    except (TypeError, StructError) as error:
        raise CompletionError(f"output_ids is no list of token ids: {error}") from error
    return ids


def _logprobs(meta: Mapping[str, Any], output_ids: Sequence[int]) -> LogprobArray:
    items: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or ()
    count = len(output_ids)
    if len(items) != count:
        raise CompletionError(f"{count} sampled ids came with {len(items)} logprobs")
    if not items:
        return np.zeros(0, dtype=np.float32)
    values = np.empty(count, dtype=np.float64)
    try:
        # One pass over items of three, as SGLang's are. Where an item is none, or its id another one, too few are left to pack.
        found = [value for (value, index, _), output_id in zip(items, output_ids, strict=True) if index == output_id]
        pack_into(f"{count}d", values.data, 0, *found)
    except (TypeError, ValueError, StructError):
        values = _logprobs_one_by_one(items, output_ids)
    top = float(values[values.argmax()])  # NaN where one of them is: to argmax that is the highest
    if math.isnan(top) or top > _ABOVE_ZERO:
        raise CompletionError(f"a logprob is not a number or above zero (largest: {top})")
    return values.astype(np.float32)


def _logprobs_one_by_one(items: Sequence[Sequence[Any]], output_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The logprobs of items of any length from two on; says which item is none, or belongs to another token."""
    try:
        values = np.frombuffer(array("d", [item[0] for item in items]), dtype=np.float64)
        ids = [item[1] for item in items]
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise CompletionError(f"a logprob is no [logprob, id, text] with a number first: {error}") from error
    for at, (index, output_id) in enumerate(zip(ids, output_ids, strict=True)):
        if index != output_id:
            raise CompletionError(f"logprob {at} belongs to token {index}, output_ids has {output_id} there")
    return values


def _weight_versions(meta: Mapping[str, Any], sampled: int) -> tuple[WeightVersion, ...]:
    """The engine's spans; one span of its `weight_version` where an older engine gives no spans."""
    spans = meta.get("weight_versions")
    if not spans:
        version = meta.get("weight_version")
        return (WeightVersion(str(version), 0, sampled),) if version is not None and sampled else ()
    found: list[WeightVersion] = []
    expected = 0
    for span in spans:
        try:
            version, start, stop = str(span["version"]), int(span["start"]), int(span["end"])
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise CompletionError(f"a weight version is no span with version, start and end: {span!r}") from error
        if start != expected or stop < start:
            raise CompletionError(f"the engine's weight_versions have a gap or overlap at token {expected}: {list(spans)}")
        found.append(WeightVersion(version, start, stop))
        expected = stop
    if expected != sampled:
        raise CompletionError(f"the engine's weight_versions cover {expected} of {sampled} sampled tokens: {list(spans)}")
    return tuple(found)
