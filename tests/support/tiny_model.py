"""A random model that is small enough for a CPU, with Qwen3's real tokenizer: 2 layers of Qwen2,
9.8 million parameters; or 3 layers of Qwen3's mixture of experts, 20 million.

Invariants: built once per machine, from a fixed seed; its vocabulary (151,936) is larger than its
tokenizer (151,669), as in Qwen, so an untrained model samples ids without text.
"""

import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
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
def tiny_model(dtype: Dtype = "float32", *, experts: bool = False, seed: int = 0) -> Path:
    """The folder of the saved model, with trl's chat template `qwen3`."""
    source = trl_template("qwen3")
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


# --- LoRA adapters, as PEFT saves them ------------------------------------------------------------

RANK, ALPHA = 4, 8
_MODULES = ("self_attn.o_proj", "mlp.down_proj")


def lora_adapter(folder: Path, seed: int) -> Path:
    """Write a random adapter of `tiny_model()` to `folder`, and return it."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in _shapes().items():
        for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
            drawn = torch.randn(shape, generator=generator) * 0.3
            tensors[f"base_model.model.{name}.{part}.weight"] = drawn
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [name.rpartition(".")[2] for name in _MODULES],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def logprobs_with(adapter: Path | None, ids: Any, start: int) -> npt.NDArray[np.float32]:
    """The logprobs of `ids[start:]` by the model with `adapter` merged into its weights."""
    import torch

    with torch.inference_mode():
        logits = _merged(adapter)(torch.tensor(ids.tolist())[None]).logits[0, start - 1 : -1]
        sampled = torch.tensor(ids[start:].tolist())[:, None]
        return torch.log_softmax(logits, dim=-1).gather(1, sampled)[:, 0].numpy()


@cache
def _merged(adapter: Path | None) -> Any:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        with torch.no_grad():
            for name in _shapes():
                a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
                model.get_submodule(name).weight += ALPHA / RANK * b @ a
    return model


def _shapes() -> dict[str, tuple[int, int]]:
    """The weights that an adapter changes, with their shapes."""
    config = json.loads((tiny_model() / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    columns = {"self_attn.o_proj": hidden, "mlp.down_proj": inner}
    return {
        f"model.layers.{layer}.{module}": (hidden, columns[module])
        for layer in range(config["num_hidden_layers"])
        for module in _MODULES
    }
