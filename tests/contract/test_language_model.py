"""The numpy network against transformers' LlamaForCausalLM in torch, both in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolroll.testing.language_model import LanguageModel
from toolroll.testing.language_model.model import KVCache, Part
from toolroll.testing.language_model.sampling import log_softmax

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "all heads": {},
    "two key heads, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "one key head, wide": {"num_key_value_heads": 1, "head_dim": 32},
    "theta and eps": {
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    },
    "bfloat16": {"dtype": "bfloat16"},
}
"""Changes of the shape, and of the type of the weights. All are computed in float32."""


def save(folder: Path, dtype: str = "float32", **changes: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**(SHAPE | changes)))
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def torch_logprobs(folder: Path, ids: Any) -> Any:
    """The logprobs at all positions, in torch float32."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # A power in float32 differs between libraries in the last bit. At position 600, the difference
    # is larger than all other rounding, so both sides get the same frequencies.
    rotary = model.model.rotary_emb
    frequencies = LanguageModel.from_folder(folder).frequencies
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=2.5e-7)
    rotary.inv_freq.copy_(torch.from_numpy(frequencies))
    with torch.no_grad():
        logits = model(torch.tensor(np.array([ids], np.int64))).logits[0]
    return torch.log_softmax(logits, -1).numpy()


def own_logprobs(folder: Path, ids: Any) -> Any:
    """The same from numpy: half of the ids as a prompt, the rest one by one."""
    network = LanguageModel.from_folder(folder)
    cache, half = KVCache(network.config, len(ids)), len(ids) // 2
    rows = [network.prefill([Part(cache, 0, ids[:half])])]
    for at in range(half, len(ids)):
        rows.append(network.decode([cache], ids[at : at + 1], [at]))
    return log_softmax(network.logits(np.concatenate(rows)))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_logprobs_are_those_of_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    save(tmp_path, **variant)
    ids = np.random.default_rng(0).integers(0, 4096, 600).astype(np.int32)
    np.testing.assert_allclose(
        own_logprobs(tmp_path, ids), torch_logprobs(tmp_path, ids), atol=1e-4
    )
