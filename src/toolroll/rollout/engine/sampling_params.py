"""Check the names of sampling parameters, and limit `max_new_tokens` to the room in the context.

SGLang answers an unknown name with status 400, but its routers drop it silently. So names are
checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolroll.rollout.engine.model_info import ModelInfo
from toolroll.rollout.errors import UsageError, prompt_too_long
from toolroll.rollout.runtime.complaints import did_you_mean, did_you_shorten
from toolroll.rollout.runtime.sglang_names import SGLANG_NAMES, TEXTS

LORA_PATH = "lora_path"
"""The parameter that names a LoRA adapter. SGLang reads it beside the sampling parameters. Here it
is one of them, so that it reaches each request, and each turn records which adapter sampled it.
"""

KNOWN = frozenset(SGLANG_NAMES) | {LORA_PATH}

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


def check_params(params: Mapping[str, Any], *, dropped: frozenset[str] = frozenset()) -> set[str]:
    """Return the unknown names in `params`, which a newer SGLang may have. Raise `UsageError` for
    an unknown name that is close to a known one, for a text instead of a number, for several
    answers to one request, and for a name that the router drops.
    """
    unknown = params.keys() - KNOWN
    if params.get("n", 1) not in (1, None):
        raise UsageError(f"n={params['n']!r}: a turn is one answer; play more samples of the task")
    for name, value in params.items():
        if isinstance(value, str) and name not in TEXTS | unknown:
            raise UsageError(f"the sampling parameter {name} cannot be the text {value!r}")
    for name in sorted(unknown):
        if hint := did_you_mean(name, KNOWN):
            raise UsageError(f"SGLang has no sampling parameter {name!r}{hint}")
    if dropped:
        check_dropped(params, dropped)
    return unknown


def sent_unchecked(name: str) -> str:
    """Return the warning about an unknown parameter, which a newer SGLang may have."""
    hint = did_you_shorten(name, KNOWN)
    return f"SGLang 0.5.23 has no sampling parameter {name!r}: it is sent unchecked{hint}"


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
