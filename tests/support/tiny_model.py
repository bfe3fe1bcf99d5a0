"""A random model that is small enough for a CPU, with Qwen3's real tokenizer: 2 layers of Qwen2,
9.8 million parameters; or 3 layers of Qwen3's mixture of experts, 20 million.

Invariants: built once per machine, from a fixed seed; its vocabulary (151,936) is larger than its
tokenizer (151,669), as in Qwen, so an untrained model samples ids without text.
"""

import importlib.metadata
from functools import cache
from pathlib import Path
from typing import Any, Literal

from support.cache import cached_folder
from support.qwen import save_qwen3, trl_template

Dtype = Literal["float32", "bfloat16"]
VOCAB_SIZE = 151_936
CONTEXT_LENGTH = 4096
EXPERTS = (3, 2)
"""Of `tiny_moe`: layers, and experts per token in each."""


@cache
def tiny_moe(seed: int = 0) -> Path:
    """The folder of a mixture of 8 experts, with the weights that `seed` draws."""
    return tiny_model(experts=True, seed=seed)


@cache
def tiny_model(
    dtype: Dtype = "float32", template: str | None = None, *, experts: bool = False, seed: int = 0
) -> Path:
    """The folder of the saved model; `template`: its chat template (default: trl's `qwen3`)."""
    source = trl_template("qwen3") if template is None else template
    sources = (Path(__file__), Path(__file__).with_name("qwen.py"))
    versions = (importlib.metadata.version("transformers"), importlib.metadata.version("torch"))
    built_from = [path.read_bytes() for path in sources]
    key: tuple[bytes | str, ...] = (dtype, source, str(seed), *built_from, *versions)

    def build(folder: Path) -> None:
        _save_weights(folder, dtype, experts=experts, seed=seed)
        save_qwen3(folder, source)

    kind = "qwen3-moe" if experts else "qwen2"
    return cached_folder(f"tiny-{kind}-{dtype}", key, build)


def _save_weights(folder: Path, dtype: Dtype, *, experts: bool, seed: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    layers, top_k = EXPERTS
    mixture: dict[str, Any] = {"head_dim": 16, "num_hidden_layers": layers, "num_experts": 8}
    mixture |= {"num_experts_per_tok": top_k, "moe_intermediate_size": 64}
    sizes: dict[str, Any] = mixture if experts else {"num_hidden_layers": 2}
    config = (Qwen3MoeConfig if experts else Qwen2Config)(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        rms_norm_eps=1e-6,
        tie_word_embeddings=not experts,  # SGLang gives Qwen3's mixture a head of its own
        bos_token_id=151_643,
        eos_token_id=151_645,
        # ten times the usual: else all tokens are equally likely, and logprobs are meaningless
        initializer_range=0.2,
        **sizes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind: Any = Qwen3MoeForCausalLM if experts else Qwen2ForCausalLM
        model = kind(config)
        model = model.to(getattr(torch, dtype))
    model.generation_config.update(
        eos_token_id=[151_645, 151_643],
        pad_token_id=151_643,
        bos_token_id=151_643,
        do_sample=True,
        temperature=1.0,
    )
    model.save_pretrained(folder)
