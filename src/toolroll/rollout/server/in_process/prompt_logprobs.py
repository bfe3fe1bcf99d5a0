"""`prompt_logprobs`: the logprobs of a prompt's tokens and of the most likely tokens at each
position, in Atropos' form.

Invariants: the returned ids are the ids that were sent. If the engine leaves out a value, an error
is raised: nothing is padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.rollout.errors import EngineError, UsageError, prompt_too_long
from toolroll.rollout.server.endpoint import Endpoint


async def prompt_logprobs(endpoint: Endpoint, ids: Sequence[int], top: int) -> dict[str, Any]:
    """Return `{"prompt_tokens": ids, "prompt_topk_token_ids": [...], "prompt_topk_logprobs":
    [...]}`. The last two have one list per position: first the prompt's own token, then the `top`
    most likely tokens except this token. The lists of the first position are empty, because the
    first token has no logprob.

    Raise `UsageError` if an id is outside the vocabulary, `ContextOverflowError` if the prompt is
    too long, and `EngineError` if the engine answers without logprobs.
    """
    await endpoint.refresh()
    limits, engine = endpoint.capabilities, endpoint.model.engine
    sent = [int(index) for index in ids]
    if not sent or top < 1:
        raise UsageError("get_logprobs needs a prompt that is not empty, and a top_k of at least 1")
    if not all(0 <= index < (limits.vocab_size or 2**31) for index in sent):
        raise UsageError(f"the prompt has an id outside the vocabulary of {limits.vocab_size}")
    if limits.context_length is not None and len(sent) >= limits.context_length:
        raise prompt_too_long(len(sent), limits.context_length - 1)
    payload = {
        "input_ids": sent,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top,
    }
    answer = await endpoint.model.post(f"{engine.url}/generate", payload)
    meta = answer.get("meta_info") or {}
    own, others = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
    if not own or not others or not len(own) == len(others) == len(sent):
        raise EngineError(f"the engine at {engine.url} returned no logprobs of the prompt")
    if [entry[1] for entry in own] != sent:
        raise EngineError(f"the engine at {engine.url} returned logprobs of other tokens")
    places = [_place(*pair) for pair in zip(own[1:], others[1:], strict=True)]
    return {
        "prompt_tokens": sent,
        "prompt_topk_token_ids": [[], *map(list, places)],
        "prompt_topk_logprobs": [[], *(list(place.values()) for place in places)],
    }


def _place(own: Sequence[Any], others: Sequence[Sequence[Any]] | None) -> Mapping[int, float]:
    """Return one position's logprobs by token id. Raise `EngineError` if a value is missing."""
    found = {int(entry[1]): entry[0] for entry in (own, *(others or ()))}
    if not others or not all(isinstance(value, float) for value in found.values()):
        raise EngineError("the engine returned no logprobs for a position of the prompt")
    return found
