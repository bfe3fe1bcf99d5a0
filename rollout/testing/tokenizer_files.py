"""The embedded tokenizer: a small byte-level BPE of our own, with a chat template of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
"""`<|end|>` ends a turn. The first three are special tokens; the rest show in decoded text, as Qwen's do."""


def load_embedded_tokenizer() -> Any:
    """The embedded tokenizer, as `transformers`' `PreTrainedTokenizerFast`, with its chat template."""
    from transformers import PreTrainedTokenizerFast  # 1-2 s: not at import

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"),
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|turn|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
        name_or_path="embedded",
    )
    tokenizer.chat_template = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer
