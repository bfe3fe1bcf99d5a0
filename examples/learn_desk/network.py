"""A Llama-shaped network in plain PyTorch, and its folder in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional


class Policy(Protocol):
    """What the policy gradient needs of a network: `Network` describes both methods."""

    def logprobs(self, ids: Tensor, where: Tensor) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


@dataclass(frozen=True)
class Shape:
    """The sizes of the network: 1.05 million parameters."""

    vocabulary: int = 2048
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    inner: int = 512
    context: int = 4096
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return the output for `x`, float [batch, tokens, hidden]."""
        batch, tokens, hidden = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, tokens, self.heads, -1).transpose(1, 2)

        q, k = (_rotate(split(proj(x)), rotary) for proj in (self.q_proj, self.k_proj))
        mixed = functional.scaled_dot_product_attention(q, k, split(self.v_proj(x)), is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, hidden))
        return out


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for `x`, float [batch, tokens, hidden]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return the output for `x`, float [batch, tokens, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Stack(nn.Module):
    """The embedding, the layers, and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the state after the last layer, float [batch, tokens, hidden]."""
        x = self.embed_tokens(ids)
        rotary = _rotary(self.shape, ids.shape[1])
        for layer in self.layers:
            x = layer(x, rotary)
        out: Tensor = self.norm(x)
        return out


class Network(nn.Module):
    """The network. Its parameters have the names of transformers' `LlamaForCausalLM`.

    Example:
        logprobs = Network(Shape()).logprobs(ids, where)  # int64 and bool [batch, tokens]
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the state after the last layer, float [batch, tokens, hidden]."""
        out: Tensor = self.model(ids)
        return out

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of the next token. The output matrix is the embedding."""
        return states @ self.model.embed_tokens.weight.T

    def logprobs(self, ids: Tensor, where: Tensor) -> Tensor:
        """Return a flat tensor with the logprob of each token in `ids` (int64 [batch, tokens]) for
        which `where` (bool [batch, tokens]) is True. The first token of a sequence has no logprob,
        so it is left out.
        """
        states = self(ids[:, :-1])[where[:, 1:]]
        found = functional.log_softmax(self.logits(states), dim=-1)
        return found.gather(1, ids[:, 1:][where[:, 1:]].unsqueeze(1)).squeeze(1)


def _rotary(shape: Shape, tokens: int) -> tuple[Tensor, Tensor]:
    size = shape.hidden // shape.heads
    # As the engine computes it: a power in float32 differs between libraries in the last bit, and
    # the angles of high positions multiply the difference.
    rates = (1 / shape.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)).float()
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32), rates)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def save_network(network: Network, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `config.json` and `model.safetensors`, which SGLang, transformers and the embedded
    engine read.
    """
    shape = network.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.hidden // shape.heads,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": shape.vocabulary - 9,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: value.to(dtype).contiguous() for name, value in network.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_network(folder: Path) -> Network:
    """Return the network that `save_network` wrote to `folder`. Its weights are float32."""
    config = json.loads((folder / "config.json").read_text())
    network = Network(
        Shape(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            inner=config["intermediate_size"],
            context=config["max_position_embeddings"],
            rope_theta=config["rope_theta"],
            norm_eps=config["rms_norm_eps"],
        )
    )
    tensors = load_file(folder / "model.safetensors")
    network.load_state_dict({name: value.float() for name, value in tensors.items()})
    return network


def with_noise(network: Network, share: float = 0.3) -> Network:
    """Add noise to each matrix, whose standard deviation is this `share` of the matrix's. Return
    the network. The rewards of a task's episodes then differ.
    """
    torch.manual_seed(0)
    with torch.no_grad():
        for matrix in (one for one in network.parameters() if one.ndim == 2):
            matrix.add_(share * matrix.std() * torch.randn_like(matrix))
    return network
