"""Check the names of sampling parameters.

SGLang answers an unknown name with status 400, but its routers drop it silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.complaints import did_you_mean
from toolroll.rollout.runtime.sglang_names import SGLANG_NAMES, TEXTS

LORA_PATH = "lora_path"
"""The parameter that names a LoRA adapter. SGLang reads it beside the sampling parameters. Here it
is one of them, so that it reaches each request, and each turn records which adapter sampled it.
"""

KNOWN = frozenset(SGLANG_NAMES) | {LORA_PATH}


def check_params(params: Mapping[str, Any]) -> set[str]:
    """Return the unknown names in `params`, which a newer SGLang may have. Raise `UsageError` for
    an unknown name that is close to a known one, for a text instead of a number, and for several
    answers to one request.
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
    return unknown


def sent_unchecked(name: str) -> str:
    """Return the warning about an unknown parameter, which a newer SGLang may have."""
    hint = did_you_mean(name, KNOWN, beginnings=True)
    return f"SGLang 0.5.23 has no sampling parameter {name!r}: it is sent unchecked{hint}"
