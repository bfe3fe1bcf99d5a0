"""The tiny model's tokenizer, as transformers loads it from its folder (torch writes the weights
beside it).
"""

from __future__ import annotations

from support.qwen import qwen3_tokenizer
from support.tiny_model import tiny_model


def test_the_saved_tokenizer_is_the_same_for_who_loads_it() -> None:
    """transformers builds its own class for the model's type: the ids must not change by that."""
    from transformers import AutoTokenizer

    qwen3 = qwen3_tokenizer()
    loaded = AutoTokenizer.from_pretrained(tiny_model())
    texts = [
        "Hello, 2026!\n\n  x = 1\r\n",
        "<|im_start|>user\nHi<|im_end|>\n<think>\n",
        "cafe\u0301 東京 🙂 I'll",
    ]
    assert [loaded.encode(text) for text in texts] == [qwen3.encode(text) for text in texts]
    assert loaded.chat_template == qwen3.chat_template
    assert loaded.eos_token_id == 151645
