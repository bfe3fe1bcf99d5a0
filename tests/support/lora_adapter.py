"""LoRA adapters for the tiny model, as PEFT saves them, and the model with one merged into it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support.tiny_model import tiny_model

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
