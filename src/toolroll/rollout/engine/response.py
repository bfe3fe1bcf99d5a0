"""Convert SGLang's answer to `/generate` to a checked `Completion`.

Invariants:

- The model can sample every id, and there are at most `max_new_tokens` ids.
- The number of ids equals the engine's count, and there is one logprob for each id.
- Every logprob is finite and at most zero, up to rounding.
- The finish reason is known, and a matched stop token is the last id.
- The weight versions cover all sampled tokens.

If an answer violates one of these rules, `CompletionError` is raised. Nothing is corrected.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from toolroll.rollout.engine.errors import foreign
from toolroll.rollout.errors import CompletionError
from toolroll.rollout.runtime.jsonable import common_prefix
from toolroll.rollout.runtime.routed_experts import new_rows
from toolroll.rollout.types import (
    Completion,
    ExpertArray,
    GenerateRequest,
    IdArray,
    LogprobArray,
    WeightVersion,
)

_OBJECT = (dict, Mapping)  # dict comes first: the check against Mapping is slow
_ABOVE_ZERO = 1e-3  # bf16 rounding of a log-softmax may end slightly above 0
_LEAST = -1e6  # a token with a lower logprob is never sampled
_FINISHES = ("stop", "length", "abort")
_ANY_ID = int(np.iinfo(np.int32).max)


def parse_completion(
    body: Mapping[str, Any],
    request: GenerateRequest,
    *,
    rid: str = "",
    vocab_size: int | None = None,
    experts_per_token: int | None = None,
) -> Completion:
    """Return the completion in `body`, the JSON object that answers `request`.

    `rid`: the id that the answer must have if it has one, or "" for any id. It is copied to the
    completion. `vocab_size`: the number of ids that the model can sample, or None if it is unknown.
    `experts_per_token`: layers * top_k, or None if it is unknown; then the experts of all tokens
    must be in `body`. `latency` and `attempts` are not in `body`: the caller sets them. Raise
    `CompletionError` if `body` is not a valid answer.
    """
    try:
        meta, text = _envelope(body, rid)
        sampled = () if body["output_ids"] is None else body["output_ids"]
        output_ids = check_ids(sampled, request, vocab_size=vocab_size)
        finish_reason, matched = _finish(meta, request, output_ids)
        _check_counts(meta, len(output_ids), None if request.images else len(request.input_ids))
        return Completion(
            output_ids=output_ids,
            logprobs=_logprobs(meta, sampled) if request.return_logprob else None,
            finish_reason=finish_reason,
            matched=matched,
            text=text,
            weight_versions=_weight_versions(meta, len(output_ids)),
            prompt_tokens=int(meta.get("prompt_tokens") or len(request.input_ids)),
            cached_tokens=check_cached(meta.get("cached_tokens")),
            rid=rid,
            routed_experts=_routed_experts(meta, request, len(output_ids), experts_per_token),
            top_logprobs=_top_logprobs(meta, len(output_ids), vocab_size),
            other_prompt=_other_prompt(body, request) if request.images else None,
        )
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CompletionError(
            f"the engine's answer cannot be read: {error}: {str(body)[:300]}"
        ) from error


def _envelope(body: Mapping[str, Any], rid: str) -> tuple[Mapping[str, Any], str]:
    """Return the `meta_info` and the text of the answer to the request `rid`."""
    if (
        not isinstance(body, _OBJECT)
        or "output_ids" not in body
        or not isinstance(body.get("meta_info"), _OBJECT)
    ):
        raise CompletionError(
            f"the engine's answer has no output_ids or no meta_info: {str(body)[:300]}"
        )
    failure = foreign(body, rid)
    if failure is not None:
        raise CompletionError(failure.message)
    text = body.get("text")
    if not isinstance(text, str | None):
        raise CompletionError(
            f"the engine's text is {str(text)[:100]!r} ({type(text).__name__}), expected a string"
        )
    return body["meta_info"], text or ""


def check_ids(output_ids: Any, request: GenerateRequest, *, vocab_size: int | None) -> IdArray:
    """Return the engine's `output_ids` as an array, int32 [n].

    Raise `CompletionError` if it is not a list of ids, if it is longer than `max_new_tokens`, or if
    the model cannot sample one of the ids.
    """
    try:
        ids: IdArray = np.array(array("i", output_ids), dtype=np.intc)
    except (TypeError, OverflowError) as error:
        raise CompletionError(f"output_ids is not a list of token ids: {error}") from error
    if not len(ids):
        return ids
    most = request.sampling_params.get("max_new_tokens")
    if most is not None and len(ids) > most:
        raise CompletionError(
            f"the engine sent {len(ids)} output_ids, expected at most max_new_tokens = {most}"
        )
    least, highest = ids[ids.argmin()], ids[ids.argmax()]
    if least < 2:  # in an array, True and False become 1 and 0
        wrong = next((item for item in output_ids if type(item) is not int), None)
        if wrong is not None:
            raise CompletionError(
                f"output_ids is not a list of token ids: {wrong!r} has type {type(wrong).__name__}"
            )
    limit = _ANY_ID if vocab_size is None else vocab_size
    if least < 0 or highest >= limit:
        position = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
        raise CompletionError(
            f"output_ids[{position}] is {ids[position]}, expected an id from 0 to {limit - 1}, the "
            f"model's vocabulary"
        )
    return ids


def _finish(
    meta: Mapping[str, Any], request: GenerateRequest, ids: IdArray
) -> tuple[str, int | str | None]:
    """Return the finish reason, and the stop token or stop string that ended the turn (or None)."""
    finish = meta.get("finish_reason")
    if not isinstance(finish, _OBJECT) or "type" not in finish:
        raise CompletionError(f"the engine's answer has no finish_reason: {finish!r}")
    kind, matched = finish["type"], finish.get("matched")
    if kind not in _FINISHES:
        raise CompletionError(
            f"the engine's finish_reason is {kind!r}, expected one of {', '.join(_FINISHES)}"
        )
    if kind != "stop":
        return kind, None
    if not len(ids):
        raise CompletionError(
            f"the engine's finish_reason is {dict(finish)}, but output_ids is empty: it must "
            f"contain the stop token"
        )
    if type(matched) is int:
        if ids[-1] != matched:
            raise CompletionError(
                f"the engine stopped at token {matched}, but output_ids end with {ids[-1]}"
            )
    elif matched is not None and not (
        isinstance(matched, str) and matched in _stop_strings(request)
    ):
        # SGLang stops with "NaN happened" after it has replaced a sampled id that is outside the
        # vocabulary.
        raise CompletionError(
            f"the engine stopped at {matched!r}, expected the last id or one of the requested stop "
            f"strings {_stop_strings(request)}"
        )
    return kind, matched


def _stop_strings(request: GenerateRequest) -> list[str]:
    strings: list[str] = []
    for name in ("stop", "stop_regex"):
        value = request.sampling_params.get(name) or ()
        strings += [value] if isinstance(value, str) else value
    return strings


def _top_logprobs(
    meta: Mapping[str, Any], sampled: int, vocab_size: int | None
) -> tuple[tuple[tuple[float, int], ...], ...] | None:
    places = meta.get("output_top_logprobs")
    if not places:
        return None
    if len(places) != sampled:
        raise CompletionError(
            f"{sampled} sampled ids came with {len(places)} lists of top logprobs"
        )
    limit = _ANY_ID if vocab_size is None else vocab_size
    for item in (item for place in places for item in place or ()):
        if (
            type(item[1]) is not int
            or not 0 <= item[1] < limit
            or not float(item[0]) <= _ABOVE_ZERO
        ):
            raise CompletionError(
                f"a top logprob is {item!r}, expected [logprob, id, text] with an id below {limit}"
            )
    return tuple(tuple((float(item[0]), item[1]) for item in place or ()) for place in places)


def _routed_experts(
    meta: Mapping[str, Any], request: GenerateRequest, sampled: int, width: int | None
) -> ExpertArray | None:
    """Return the experts of the tokens from `request.routed_experts_start` on.

    The engine sends the base64 of an int32 array [tokens, layers, top_k], without its shape (SGLang
    0.5.23, `io_struct`).
    """
    encoded = meta.get("routed_experts")
    if not encoded:
        return None
    try:
        return new_rows(
            np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.int32),
            start=request.routed_experts_start,
            tokens=len(request.input_ids) + sampled,
            width=width,
        )
    except (ValueError, TypeError) as error:
        raise CompletionError(f"the engine's routed_experts cannot be read: {error}") from error


def _other_prompt(body: Mapping[str, Any], request: GenerateRequest) -> str | None:
    """Return how the ids that the engine read differ from those of the request, or None."""
    read, sent = body.get("prompt_token_ids"), request.input_ids.tolist()
    if not isinstance(read, list):
        return "the engine did not return prompt_token_ids"
    if read == sent:
        return None
    position = common_prefix(read, sent)
    return f"the engine read {len(read)} tokens, expected {len(sent)}; token {position} differs"


def _check_counts(meta: Mapping[str, Any], sampled: int, prompt: int | None) -> None:
    counted = meta.get("completion_tokens")
    if counted is not None and (type(counted) is not int or counted != sampled):
        raise CompletionError(
            f"the engine counts {counted!r} sampled tokens and sent {sampled} output_ids"
        )
    read = meta.get("prompt_tokens")
    if None not in (read, prompt) and (type(read) is not int or read != prompt):
        raise CompletionError(
            f"the engine read a prompt of {read!r} tokens, but {prompt} were sent"
        )


def check_cached(count: Any) -> int:
    """Return the number of tokens that the engine had cached, or 0 if it does not say. Raise
    `CompletionError` if it is not a number of tokens, which no reader of an episode would take.
    """
    if count is None:
        return 0
    if type(count) is not int or not 0 <= count <= _ANY_ID:
        raise CompletionError(f"cached_tokens is {count!r}, expected a number of tokens")
    return count


def _logprobs(meta: Mapping[str, Any], output_ids: Sequence[int]) -> LogprobArray:
    items: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or ()
    count = len(output_ids)
    if len(items) != count:
        raise CompletionError(f"{count} sampled ids came with {len(items)} logprobs")
    if not items:
        return np.zeros(0, dtype=np.float32)
    try:
        values = np.frombuffer(array("d", [item[0] for item in items]), dtype=np.float64)
        ids = [item[1] for item in items]
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise CompletionError(
            f"an entry of output_token_logprobs is not [logprob, id, text] with a number first: "
            f"{error}"
        ) from error
    if ids != list(output_ids):
        position = common_prefix(ids, output_ids)
        raise CompletionError(
            f"logprob {position} belongs to token {ids[position]}, output_ids has "
            f"{output_ids[position]} there"
        )
    checked = check_logprobs(values)
    # In an array, False becomes 0.0.
    if values.max() >= 0.0 and any(item[0] is False for item in items):
        raise CompletionError("a logprob is False, expected a number")
    return checked


def check_logprobs(values: np.ndarray[Any, np.dtype[np.float64]]) -> LogprobArray:
    """Return `values` as float32. Raise `CompletionError` if one of them cannot be the logprob of a
    sampled token.
    """
    if not len(values):
        return np.zeros(0, dtype=np.float32)
    # argmax and argmin return the index of a NaN if there is one.
    top, least = float(values[values.argmax()]), float(values[values.argmin()])
    if math.isnan(top) or top > _ABOVE_ZERO:
        raise CompletionError(f"a logprob is NaN or above zero (largest: {top})")
    if least < _LEAST:
        raise CompletionError(
            f"a logprob is {least}, expected a finite number of at least {_LEAST:g}"
        )
    return values.astype(np.float32)


def _weight_versions(meta: Mapping[str, Any], sampled: int) -> tuple[WeightVersion, ...]:
    """Return the engine's spans of weight versions. An older engine sends none. In this case,
    return one span with its `weight_version`.
    """
    spans = meta.get("weight_versions")
    if not spans:
        version = meta.get("weight_version")
        return (WeightVersion(str(version), 0, sampled),) if version is not None and sampled else ()
    versions: list[WeightVersion] = []
    expected = 0
    for span in spans:
        try:
            version, start, stop = str(span["version"]), span["start"], span["end"]
            if type(start) is not int or type(stop) is not int:
                raise TypeError("start and end must be integers")
        except (TypeError, LookupError) as error:
            raise CompletionError(
                f"a weight version is not a span with version, start and end: {span!r}"
            ) from error
        if start != expected or stop < start:
            raise CompletionError(
                f"the engine's weight_versions have a gap or overlap at token {expected}: "
                f"{list(spans)}"
            )
        versions.append(WeightVersion(version, start, stop))
        expected = stop
    if expected != sampled:
        raise CompletionError(
            f"the engine's weight_versions cover {expected} of {sampled} sampled tokens: "
            f"{list(spans)}"
        )
    return tuple(versions)
