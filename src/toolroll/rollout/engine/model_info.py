"""`ModelInfo`: the limits and the version of the served model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PADDING = 4096
"""The maximum number of embedding rows that a model has beyond its tokenizer's tokens. Published
models have up to 2,100.
"""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The limits and the version of a served model. Unknown values are None.

    `context_length`: the maximum length of the prompt and the answer together, in tokens.
    `vocab_size`: the number of the tokenizer's ids. A prompt with an id of `vocab_size` or
    more may crash the engine, because SGLang 0.5.23 does not check ids. Such an id is safe only if
    the engine itself sampled it: models have more embedding rows than their tokenizer has tokens.
    `max_input_length`: the longest prompt that fits into the engine's KV cache, in tokens.
    """

    context_length: int | None = None
    vocab_size: int | None = None
    weight_version: str | None = None
    model_path: str | None = None
    max_input_length: int | None = None
    sglang_version: str | None = None
    session_cache: bool | None = None
    """True if the prefix cache evicts open sessions last (--enable-session-radix-cache)."""

    @property
    def sampled_limit(self) -> int | None:
        """The model samples only ids below this one: at most `_PADDING` embedding rows follow the
        tokenizer's rows.
        """
        return None if self.vocab_size is None else self.vocab_size + _PADDING

    @property
    def prompt_limit(self) -> int | None:
        """The smallest prompt length that the engine refuses. Such a prompt fills the context or
        exceeds `max_input_length`.
        """
        context, prompt = self.context_length, self.max_input_length
        if prompt is None:
            return context
        return prompt + 1 if context is None else min(context, prompt + 1)


def read_model_info(
    model_info: Mapping[str, Any], server_info: Mapping[str, Any], models: Mapping[str, Any]
) -> ModelInfo:
    """Return the info from SGLang's `/model_info`, `/server_info` and `/v1/models`. Missing values
    are None.

    `/server_info` has `context_length` only if it was set on the command line. `/v1/models` always
    has `max_model_len`. SGLang refuses a prompt whose length is `max_req_input_len`.
    """
    refused = _integer(server_info.get("max_req_input_len"))
    cards = models.get("data")
    card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], Mapping) else {}
    return ModelInfo(
        context_length=_integer(card.get("max_model_len"))
        or _integer(server_info.get("context_length")),
        weight_version=_text(model_info.get("weight_version") or server_info.get("weight_version")),
        model_path=_text(model_info.get("model_path") or server_info.get("model_path")),
        max_input_length=None if refused is None else refused - 1,
        sglang_version=_text(server_info.get("version")),
        session_cache=_boolean(server_info.get("enable_session_radix_cache")),
    )


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
