"""`Weights`: the tensors of a Llama network in float32, read from model.safetensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from toolroll.rollout.testing.language_model.config import LlamaConfig, ModelFolderError

Tensor = npt.NDArray[np.float32]
_Take = Callable[..., Tensor]
_UNUSED = "rotary_emb.inv_freq"  # in old checkpoints, although the configuration determines it


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Matrices are (inputs, outputs). `qkv` and `gate_up` each hold several matrices
    side by side.
    """

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors. `embedding` is (vocabulary, hidden), and `head` is (hidden, vocabulary)."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor

    @classmethod
    def from_folder(cls, folder: Path, config: LlamaConfig) -> Weights:
        """Read model.safetensors (F32, F16 or BF16).

        Raise `ModelFolderError` if the file cannot be read, or if its tensors do not fit `config`.
        """
        path = folder / "model.safetensors"
        tensors = _read(path)

        def take(name: str, *shape: int) -> Tensor:
            found = tensors.pop(name, None)
            if found is None:
                raise ModelFolderError(f"{path} has no tensor {name}")
            if found.shape != shape:
                raise ModelFolderError(f"{path}: {name} has the shape {found.shape}, not {shape}")
            return found

        weights = _assemble(take, config)
        left = [name for name in tensors if not name.endswith(_UNUSED) and name != "lm_head.weight"]
        if left:
            raise ModelFolderError(f"{path}: tensors that are not supported: {', '.join(left[:4])}")
        return weights


def _assemble(take: _Take, config: LlamaConfig) -> Weights:
    vocabulary, hidden = config.vocab_size, config.hidden_size
    embedding = take("model.embed_tokens.weight", vocabulary, hidden)
    tied = config.tie_word_embeddings
    head = embedding if tied else take("lm_head.weight", vocabulary, hidden)
    return Weights(
        embedding,
        tuple(_layer(take, config, at) for at in range(config.num_hidden_layers)),
        take("model.norm.weight", hidden),
        np.ascontiguousarray(head.T),
    )


def _layer(take: _Take, config: LlamaConfig, at: int) -> Layer:
    prefix, hidden, mlp = f"model.layers.{at}.", config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim

    def matrix(name: str, outputs: int, inputs: int) -> Tensor:
        return take(f"{prefix}{name}_proj.weight", outputs, inputs).T

    return Layer(
        attention_norm=take(f"{prefix}input_layernorm.weight", hidden),
        qkv=np.hstack(
            [
                matrix("self_attn.q", queries, hidden),
                matrix("self_attn.k", keys, hidden),
                matrix("self_attn.v", keys, hidden),
            ]
        ),
        output=np.ascontiguousarray(matrix("self_attn.o", hidden, queries)),
        mlp_norm=take(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=np.hstack([matrix("mlp.gate", mlp, hidden), matrix("mlp.up", mlp, hidden)]),
        down=np.ascontiguousarray(matrix("mlp.down", hidden, mlp)),
    )


def _read(path: Path) -> dict[str, Tensor]:
    try:
        tensors = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except FileNotFoundError as error:
        raise ModelFolderError(
            f"there is no {path}; weights in several safetensors files are not supported"
        ) from error
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    return {name: _to_float32(tensor, f"{path}: {name}") for name, tensor in tensors}


def _to_float32(tensor: dict[str, Any], name: str) -> Tensor:
    data, kind = tensor["data"], tensor["dtype"]
    if kind == "BF16":  # the upper half of a float32
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif kind in ("F32", "F16"):
        stored = np.float32 if kind == "F32" else np.float16
        values = np.frombuffer(data, stored).astype(np.float32, copy=False)
    else:
        raise ModelFolderError(f"{name} has the type {kind}; only F32, F16 and BF16 are supported")
    return values.reshape(tensor["shape"])
