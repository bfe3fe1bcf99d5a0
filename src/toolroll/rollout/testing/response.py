"""Answers of SGLang's `/generate`: the bodies of 0.5.23, field for field.

Invariant: the log entry and the body are written by the same function, from the same ids and
logprobs.
"""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from toolroll.rollout.testing.generation import Generation
from toolroll.rollout.testing.log import LoggedRequest
from toolroll.rollout.testing.logprob import reference_logprob, reference_logprobs, top_logprobs
from toolroll.rollout.testing.wire import EngineRequest


def answer_body(
    request: EngineRequest,
    entry: LoggedRequest,
    generation: Generation,
    *,
    ids: list[int],
    finish: dict[str, Any] | None,
    text: str,
    version: str,
) -> dict[str, Any]:
    """Return the answer with `ids`, and write its values into `entry`. `finish` is None for a part
    of a stream.
    """
    logprobs = reference_logprobs(entry.input_ids, ids)
    spans = generation.spans(len(ids))
    entry.output_ids, entry.logprobs, entry.weight_versions = ids, logprobs, spans
    entry.finish_reason = "" if finish is None else str(finish["type"])
    entry.matched = None if finish is None else finish.get("matched")
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(entry.input_ids),
        "weight_version": version,
        "num_retractions": generation.retractions,
    }
    if request.return_logprob:
        meta["input_token_logprobs"] = _input_logprobs(entry.input_ids, request.logprob_start_len)
        if request.top_logprobs_num and request.logprob_start_len >= 0:
            meta["input_top_logprobs"] = _input_top_logprobs(
                entry.input_ids, request.logprob_start_len, request.top_logprobs_num
            )
        meta["output_token_logprobs"] = [
            [value, index, None] for value, index in zip(logprobs, ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(ids)
    if request.return_logprob and request.top_logprobs_num:
        meta["output_top_logprobs"] = [
            [[value, index, None] for value, index in best]
            for best in top_logprobs(entry.input_ids, ids, request.top_logprobs_num)
        ]
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(ids),
        "cached_tokens": entry.cached_tokens,
        "weight_versions": spans,
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": 0.0,
        "response_sent_to_client_ts": time.time(),
    }
    if request.return_routed_experts:
        meta["routed_experts"] = _routed_experts([*entry.input_ids.tolist(), *ids])
    return {"text": text, "output_ids": ids, "meta_info": meta}


def _routed_experts(ids: list[int]) -> str:
    """Return fake experts for every token except the last, as base64 of int32 [tokens - 1, 2, 2]:
    two experts in each of two layers.
    """
    experts = [[[index % 8, index % 7], [index % 5, index % 3]] for index in ids[:-1]]
    return base64.b64encode(np.array(experts, dtype=np.int32).tobytes()).decode()


def queue_abort_body(request: EngineRequest, version: str) -> dict[str, Any]:
    """Return the answer to a request that was aborted before it ran. Such an answer has no
    prompt_tokens and no cached_tokens.
    """
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": version,
        "num_retractions": 0,
        "completion_tokens": 0,
        "weight_versions": [],
        "e2e_latency": 0.0,
    }
    if request.return_logprob:
        meta |= {
            "input_token_logprobs": [],
            "output_token_logprobs": [],
            "output_token_logprobs_length": 0,
        }
    return {"text": "", "output_ids": [], "meta_info": meta}


def _input_top_logprobs(
    prompt: npt.NDArray[np.int32], start: int, top: int
) -> list[list[list[Any]] | None]:
    """Return `top` entries `[logprob, id, null]` for each position from `start` on, the likeliest
    first: those of the prompt's id and the next higher ids. The first position has None.
    """
    found: list[list[list[Any]] | None] = [None]
    for at in range(start + 1, len(prompt)):
        ids = range(int(prompt[at]), int(prompt[at]) + top)
        entries = [[reference_logprob(prompt[:at], index), index, None] for index in ids]
        found.append(sorted(entries, key=lambda entry: -entry[0]))
    return found


def _input_logprobs(prompt: npt.NDArray[np.int32], start: int) -> list[list[Any]]:
    """Return `[logprob, id, null]` for each id from `start` on. The logprob of the first of them is
    None. Return an empty list if `start` is -1.
    """
    if not 0 <= start < len(prompt):
        return []
    ids: list[int] = prompt[start:].tolist()
    values = [None, *reference_logprobs(prompt[: start + 1], ids[1:])]
    return [[value, index, None] for value, index in zip(values, ids, strict=True)]
