"""The embedded tokenizer: a small byte-level BPE tokenizer in this package, with its own chat
template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolroll.rollout.runtime.optional import import_transformers

FOLDER = Path(__file__).parent / "tokenizer"

CONTROL_TOKENS = (
    "<|pad|>",
    "<|turn|>",
    "<|end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""The added tokens of the embedded tokenizer. `<|end|>` ends a turn. The first three are special
tokens, which decoding can skip. The others always appear in decoded text, as in Qwen's tokenizer.
"""


def embedded_tokenizer_path() -> Path:
    """Return the folder of the embedded tokenizer, for `AutoTokenizer.from_pretrained`."""
    return FOLDER


def load_embedded_tokenizer() -> Any:
    """Return the embedded tokenizer with its chat template, as a `PreTrainedTokenizerFast`."""
    transformers: Any = import_transformers()
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["tokenizer_class"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"), name_or_path="embedded", **settings
    )
    tokenizer.chat_template = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer
