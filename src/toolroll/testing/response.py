"""Answers of SGLang's `/generate`: the bodies of version 0.5.23, field for field.

Invariant: the same function writes the log entry and the body, from the same ids and logprobs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from toolroll.testing.generation import Generation
from toolroll.testing.policy import LoggedRequest
from toolroll.testing.token_source import Answer
from toolroll.testing.wire import EngineRequest


def answer_body(
    request: EngineRequest,
    entry: LoggedRequest,
    generation: Generation,
    answer: Answer,
    *,
    version: str,
) -> dict[str, Any]:
    """Return the response body for `answer`. Write the ids, logprobs, finish reason and weight
    versions of the answer to `entry`, its entry in the log.
    """
    ids, finish = answer.ids, answer.finish
    spans = generation.spans(len(ids))
    entry.output_ids, entry.logprobs, entry.weight_versions = ids, answer.logprobs, spans
    entry.finish_reason = "" if finish is None else str(finish["type"])
    entry.matched = None if finish is None else finish.get("matched")
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(entry.input_ids),
        "weight_version": version,
        "num_retractions": 0,
    }
    if request.return_logprob:
        meta |= _logprobs(request, entry, answer)
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
    if answer.routed_experts is not None:
        meta["routed_experts"] = answer.routed_experts
    return {"text": answer.text, "output_ids": ids, "meta_info": meta}


def without_beginning(body: dict[str, Any], ids: int, characters: int) -> dict[str, Any]:
    """Return `body` as an event of SGLang's --incremental-streaming-output: without the first `ids`
    ids with their logprobs, and without the first `characters` of the text.
    """
    meta = {
        name: value[ids:] if name in ("output_token_logprobs", "output_top_logprobs") else value
        for name, value in body["meta_info"].items()
    }
    return {
        "text": body["text"][characters:],
        "output_ids": body["output_ids"][ids:],
        "meta_info": meta,
    }


def _logprobs(request: EngineRequest, entry: LoggedRequest, answer: Answer) -> dict[str, Any]:
    """Return the logprob fields of a body. The entry of each position is `[logprob, id, null]`. The
    first requested position of the prompt has null instead of a logprob.
    """
    start, inputs = request.logprob_start_len, [None, *answer.input_logprobs]
    # an aborted request may not have the logprobs of its whole prompt
    scored = entry.input_ids[start : start + len(inputs)].tolist() if start >= 0 else []
    pairs = zip(inputs[: len(scored)], scored, strict=True)
    fields: dict[str, Any] = {"input_token_logprobs": _entries(pairs)}
    if request.top_logprobs_num and start >= 0:
        fields["input_top_logprobs"] = [None, *map(_entries, answer.input_top_logprobs)]
    fields["output_token_logprobs"] = _entries(zip(answer.logprobs, answer.ids, strict=True))
    fields["output_token_logprobs_length"] = len(answer.ids)
    if request.top_logprobs_num:
        fields["output_top_logprobs"] = [_entries(top) for top in answer.top_logprobs]
    return fields


def _entries(pairs: Iterable[tuple[float | None, int]]) -> list[list[Any]]:
    return [[value, index, None] for value, index in pairs]


def queue_abort_body(request: EngineRequest, version: str) -> dict[str, Any]:
    """Return the answer to a request that was aborted before it ran. Such an answer has neither
    `prompt_tokens` nor `cached_tokens`.
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
