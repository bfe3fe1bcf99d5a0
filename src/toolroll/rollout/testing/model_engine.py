"""`load_engine`: the embedded engine with a small language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.tokenizers import load_tokenizer
from toolroll.rollout.testing.engine import EmbeddedEngine
from toolroll.rollout.testing.language_model import LanguageModel, ModelFolderError

_RUNNING = 64


def load_engine(folder: str | Path, **options: Any) -> EmbeddedEngine:
    """Return an engine that serves the language model in `folder`. The folder contains a small
    Llama network and its tokenizer, in the format of Hugging Face. The engine samples in float32
    with numpy, and does not need torch.

    `options` are parameters of `EmbeddedEngine`. By default, the context length, the vocabulary and
    the stop tokens are the model's, and `max_running` is 64. Raise `UsageError` if the folder
    cannot be served.

    Example::

        async with load_engine("path/to/model", seed=7) as engine:
            ...  # SGLang's /generate at engine.url
    """
    try:
        model = LanguageModel.from_folder(folder)
    except ModelFolderError as error:
        raise UsageError(str(error)) from error
    config, tokenizer = model.config, load_tokenizer(str(folder))
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"{folder}: the tokenizer has {len(tokenizer)} ids, but the network has "
            f"{config.vocab_size}"
        )
    length, limit = options.get("context_length", 0), config.max_position_embeddings
    if length > limit:
        raise UsageError(f"{folder}: the context length is at most {limit}, not {length}")
    eos = tokenizer.eos_token_id
    defaults: dict[str, Any] = {
        "context_length": limit,
        "stop_token_ids": sorted({*config.eos_token_ids, *([] if eos is None else [eos])}),
        "vocab_size": config.vocab_size,
        "max_running": _RUNNING,
    }
    return EmbeddedEngine(tokenizer, model, **(defaults | options))
