"""A random model that is small enough for a CPU, with Qwen3's real tokenizer: 2 layers of Qwen2,
9.8 million parameters.

Invariants: built once per machine, from a fixed seed; its vocabulary (151,936) is larger than its
tokenizer (151,669), as in Qwen, so an untrained model samples ids without text.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import Path
from typing import Literal

from support.cache import cached_folder
from support.qwen import save_qwen3, trl_template

Dtype = Literal["float32", "bfloat16"]
VOCAB_SIZE = 151_936
CONTEXT_LENGTH = 4096


@cache
def tiny_model(dtype: Dtype = "float32", template: str | None = None) -> Path:
    """The folder of the model, as `save_pretrained` writes it; `template`: its chat template
    (default: trl's `qwen3`).
    """
    source = trl_template("qwen3") if template is None else template
    sources = (Path(__file__), Path(__file__).with_name("qwen.py"))
    versions = (importlib.metadata.version("transformers"), importlib.metadata.version("torch"))
    key: tuple[bytes | str, ...] = (
        dtype,
        source,
        *(path.read_bytes() for path in sources),
        *versions,
    )

    def build(folder: Path) -> None:
        _save_weights(folder, dtype)
        save_qwen3(folder, source)

    return cached_folder(f"tiny-qwen2-{dtype}", key, build)


def _save_weights(folder: Path, dtype: Dtype) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=151_643,
        eos_token_id=151_645,
        # ten times the usual: else all tokens are equally likely, and logprobs are meaningless
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config.update(
        eos_token_id=[151_645, 151_643],
        pad_token_id=151_643,
        bos_token_id=151_643,
        do_sample=True,
        temperature=1.0,
    )
    model.save_pretrained(folder)
