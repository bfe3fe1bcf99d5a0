"""A tiny Llama network with random weights, as a Hugging Face folder, and its engine."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from safetensors.numpy import save_file
from support.wire import Wire

from toolroll.testing import EmbeddedEngine, embedded_tokenizer_path, load_engine

VOCABULARY = 4128
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "eos_token_id": 4089,
}


def tiny_tensors(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Return random tensors, by their names in model.safetensors."""
    config, rng = CONFIG | changes, np.random.default_rng(seed)
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    named = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    named["model.embed_tokens.weight"] = (config["vocab_size"], hidden)
    named["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        named["lm_head.weight"] = (config["vocab_size"], hidden)
    # large enough that answers depend on the whole prompt
    return {
        name: (rng.standard_normal(shape) * 0.3 + ("norm" in name)).astype(np.float32)
        for name, shape in named.items()
    }


def write_model(
    folder: Path, seed: int = 0, tensors: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """Write config.json and model.safetensors. `changes`: other values of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    save_file(tensors or tiny_tensors(seed, **changes), folder / "model.safetensors")
    return folder


def write_tiny_llama(folder: Path, **changes: Any) -> Path:
    """Write a whole folder, with the embedded tokenizer."""
    for file in embedded_tokenizer_path().iterdir():
        if file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file.name).write_bytes(file.read_bytes())
    return write_model(folder, **changes)


@asynccontextmanager
async def wired_model(folder: Path, **settings: Any) -> AsyncIterator[tuple[EmbeddedEngine, Wire]]:
    """An engine that serves `folder`, and a connection to it."""
    async with load_engine(folder, **settings) as engine, aiohttp.ClientSession() as http:
        yield engine, Wire(http, engine.url)
