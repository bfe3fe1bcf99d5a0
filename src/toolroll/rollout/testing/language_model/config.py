"""`LlamaConfig`: the shape of a Llama network, read from the config.json of a Hugging Face
folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ARCHITECTURE = "LlamaForCausalLM"
_DEFAULT_THETA = 10000.0
_BESIDE_THE_NETWORK = ("max_position_embeddings", "eos_token_ids")


class ModelFolderError(ValueError):
    """A model cannot be loaded. The message names the file, and says what is wrong or not
    supported.
    """


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
    given = data.get("rope_parameters")
    return dict(given) if given else {"rope_theta": data.get("rope_theta")}


def _refuse_unsupported(data: dict[str, Any], path: Path) -> None:
    architectures = data.get("architectures") or [data.get("model_type")]
    if architectures not in ([_ARCHITECTURE], ["llama"]):
        raise ModelFolderError(f"{path}: only {_ARCHITECTURE} is supported, not {architectures}")
    scaling = [data.get("rope_scaling") or {}, _rope(data)]
    kinds = [each.get("rope_type", each.get("type", "default")) for each in scaling]
    neutral: dict[str, tuple[Any, Any]] = {
        "attention_bias": (data.get("attention_bias") or False, False),
        "mlp_bias": (data.get("mlp_bias") or False, False),
        "hidden_act": (data.get("hidden_act", "silu"), "silu"),
        "quantization_config": (data.get("quantization_config"), None),
        "rope_type": (kinds, ["default", "default"]),
        "partial_rotary_factor": (_rope(data).get("partial_rotary_factor") or 1.0, 1.0),
    }
    for name, (given, supported) in neutral.items():
        if given != supported:
            raise ModelFolderError(f"{path}: {name} is not supported: {given!r}")
