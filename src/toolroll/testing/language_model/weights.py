"""`LlamaConfig` and `Weights`: a Llama network, read from a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

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
            tensor = tensors.pop(name, None)
            if tensor is None:
                raise ModelFolderError(f"{path} has no tensor {name}")
            if tensor.shape != shape:
                raise ModelFolderError(f"{path}: {name} has the shape {tensor.shape}, not {shape}")
            return tensor

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
        tuple(_layer(take, config, number) for number in range(config.num_hidden_layers)),
        take("model.norm.weight", hidden),
        np.ascontiguousarray(head.T),
    )


def _layer(take: _Take, config: LlamaConfig, number: int) -> Layer:
    prefix, hidden, mlp = f"model.layers.{number}.", config.hidden_size, config.intermediate_size
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


_ARCHITECTURE = "LlamaForCausalLM"
_DEFAULT_THETA = 10000.0
_BESIDE_THE_NETWORK = ("max_position_embeddings", "eos_token_ids")


class ModelFolderError(ValueError):
    """A model cannot be loaded. The message names the file and the problem."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The fields have the same names as in config.json. As in SGLang, `eos_token_ids` contains all
    ids that end a sequence, including those in generation_config.json.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> LlamaConfig:
        """Read config.json. Raise `ModelFolderError` if the network is not supported."""
        path = folder / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            _refuse_unsupported(data, path)
            extra = folder / "generation_config.json"
            more = json.loads(extra.read_text(encoding="utf-8")) if extra.exists() else {}
            return cls._read(data, {*_eos(data), *_eos(more)})
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read: {error}") from error
        except ModelFolderError:
            raise
        except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise ModelFolderError(f"{path} is not a model's configuration: {error}") from error
        except KeyError as error:
            raise ModelFolderError(f"{path} has no {error}") from error

    @classmethod
    def _read(cls, data: dict[str, Any], eos: set[int]) -> LlamaConfig:
        heads, hidden = int(data["num_attention_heads"]), int(data["hidden_size"])
        key_heads = int(data.get("num_key_value_heads") or heads)
        head_dim = int(data.get("head_dim") or hidden // heads)
        if heads % key_heads or head_dim % 2:
            raise ValueError(
                f"{heads} heads, {key_heads} key heads and head_dim {head_dim} do not fit together"
            )
        return cls(
            vocab_size=int(data["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(data["intermediate_size"]),
            num_hidden_layers=int(data["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=head_dim,
            rms_norm_eps=float(data["rms_norm_eps"]),
            rope_theta=float(_rope(data).get("rope_theta") or _DEFAULT_THETA),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            max_position_embeddings=int(data["max_position_embeddings"]),
            eos_token_ids=tuple(sorted(eos)),
        )

    def differences(self, other: LlamaConfig) -> list[str]:
        """Return the names of the fields in which the two networks differ. The context length and
        the stop tokens are not compared.
        """
        names = [name for name in self.__slots__ if name not in _BESIDE_THE_NETWORK]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def _eos(data: dict[str, Any]) -> list[int]:
    eos = data.get("eos_token_id")
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, which transformers 5 writes instead of `rope_theta`. For older
    files, build it from the old fields.
    """
    parameters = data.get("rope_parameters")
    return dict(parameters) if parameters else {"rope_theta": data.get("rope_theta")}


def _refuse_unsupported(data: dict[str, Any], path: Path) -> None:
    architectures = data.get("architectures") or [data.get("model_type")]
    if architectures not in ([_ARCHITECTURE], ["llama"]):
        raise ModelFolderError(f"{path}: only {_ARCHITECTURE} is supported, not {architectures}")
    scaling = [data.get("rope_scaling") or {}, _rope(data)]
    kinds = [rope.get("rope_type", rope.get("type", "default")) for rope in scaling]
    neutral: dict[str, tuple[Any, Any]] = {
        "attention_bias": (data.get("attention_bias") or False, False),
        "mlp_bias": (data.get("mlp_bias") or False, False),
        "hidden_act": (data.get("hidden_act", "silu"), "silu"),
        "quantization_config": (data.get("quantization_config"), None),
        "rope_type": (kinds, ["default", "default"]),
        "partial_rotary_factor": (_rope(data).get("partial_rotary_factor") or 1.0, 1.0),
    }
    for name, (value, supported) in neutral.items():
        if value != supported:
            raise ModelFolderError(f"{path}: {name} is not supported: {value!r}")
