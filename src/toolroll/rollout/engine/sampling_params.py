"""Find the sampling parameters that a router drops, and limit `max_new_tokens` to the room in the
context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolroll.rollout.engine.model_info import ModelInfo
from toolroll.rollout.errors import UsageError, prompt_too_long
from toolroll.rollout.runtime.param_names import KNOWN, LORA_PATH

DROPPED_BY_SMG = frozenset(
    (
        "stop_regex beam_width structural_tag spaces_between_special_tokens stream_interval "
        "logit_bias watermark choice"
    ).split()
)
"""Dropped silently by smg 1.13.0."""
DROPPED_BY_ROUTER = DROPPED_BY_SMG | {"custom_params"}
"""Dropped silently by sglang-router 0.3.2."""

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's own default. It is sent explicitly, so that the recorded parameters are the effective
ones.
"""


def check_dropped(names: Iterable[str], dropped: frozenset[str]) -> None:
    """Raise `UsageError` for a name that the router drops."""
    for name in dropped_names(names, dropped):
        raise UsageError(
            f"the router silently drops the sampling parameter {name!r}: connect to the worker "
            f"directly to use it"
        )


def dropped_names(names: Iterable[str], dropped: frozenset[str]) -> list[str]:
    """Return those of `names` that the router drops: the `dropped` ones and, because every router
    drops what it does not know, the unknown ones. `dropped` is empty if there is no router.
    """
    return [name for name in names if name in dropped or (dropped and name not in KNOWN)]


def request_fields(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request's JSON that hold `sampling_params`."""
    params = dict(sampling_params)
    lora = {LORA_PATH: params.pop(LORA_PATH)} if LORA_PATH in params else {}
    return {"sampling_params": params, **lora}


def effective_params(
    sampling_params: Mapping[str, Any], prompt_length: int, info: ModelInfo
) -> dict[str, Any]:
    """Return `sampling_params` as they are sent for a prompt of `prompt_length` tokens.

    `max_new_tokens` is always set, and is at most the room that is left in the context. SGLang
    answers 400 if it is larger.

    Raise `ContextOverflowError` if there is no room for a single token. Such a prompt must not be
    sent: SGLang would answer 400, and ten of these answers open the circuit breaker of router 0.3.2
    for all its clients.
    """
    limit = info.prompt_limit
    if limit is not None and prompt_length >= limit:
        raise prompt_too_long(prompt_length, limit - 1)
    requested = sampling_params.get("max_new_tokens")
    room = None if info.context_length is None else info.context_length - prompt_length
    tokens = DEFAULT_MAX_NEW_TOKENS if requested is None else int(requested)
    return {**sampling_params, "max_new_tokens": tokens if room is None else min(tokens, room)}
