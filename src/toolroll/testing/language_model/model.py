"""`LanguageModel`: a small Llama network, computed in float32 with numpy.

Invariant: a token's hidden state is the same in a prefill and in a decode step, and does not depend
on the other sequences of the batch. Only float32 rounding differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from toolroll.testing.language_model.weights import (
    LlamaConfig,
    ModelFolderError,
    Tensor,
    Weights,
)

_QUERY_BLOCK = 128
"""The number of prompt queries whose scores are computed at once. A smaller number wastes less work
above the diagonal.
"""

_Ids = npt.NDArray[np.int32]
_Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens `ids` of one sequence. The first of them is at the position `start`. The
    sequence's `cache` contains the keys and values of all earlier tokens, and has room for those of
    `ids`.
    """

    cache: KVCache
    start: int
    ids: _Ids

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.ids)


class LanguageModel:
    """A network that the embedded engine can sample from (`load_engine`). It needs numpy, not
    torch. Hidden states have the shape (tokens, hidden_size). `frequencies` has the
    angles of the rotary embedding per position, in radians: (head_dim / 2,).
    """

    def __init__(self, config: LlamaConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._width = config.head_dim
        self._scale = config.head_dim**-0.5
        # Rounded once, from float64: powers in float32 differ between libraries and processors in
        # the last bit, and high positions multiply the difference.
        exponents = np.arange(0, self._width, 2) / self._width
        self.frequencies = (1 / config.rope_theta**exponents).astype(np.float32)

    @classmethod
    def from_folder(cls, folder: str | Path) -> LanguageModel:
        """Load config.json and model.safetensors of a Hugging Face folder.

        Raise `ModelFolderError`, which names what is missing or not supported.
        """
        path = Path(folder)
        config = LlamaConfig.from_folder(path)
        return cls(config, Weights.from_folder(path, config))

    def updated(self, folder: str | Path) -> LanguageModel:
        """Return the same network with the weights in `folder`.

        Raise `ModelFolderError` if the weights do not fit.
        """
        updated = LanguageModel.from_folder(folder)
        if different := self.config.differences(updated.config):
            raise ModelFolderError(f"{folder} is another network: {', '.join(different)} differ")
        return updated

    def prefill(self, parts: Sequence[Part]) -> Tensor:
        """Compute the tokens of all parts, and write their keys and values to the caches. Return
        the final hidden states, concatenated.
        """

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            attended, start = np.empty_like(queries), 0
            for part in parts:
                tokens = slice(start, start := start + len(part.ids))
                own_keys, own_values = part.cache.keys[layer], part.cache.values[layer]
                own_keys[..., part.start : part.end] = keys[tokens].transpose(1, 2, 0)
                own_values[:, part.start : part.end] = values[tokens].swapaxes(0, 1)
                attended[tokens] = self._attend_prompt(
                    queries[tokens], own_keys, own_values, part.end
                )
            return attended

        ids = np.concatenate([part.ids for part in parts])
        positions = np.concatenate([np.arange(part.start, part.end) for part in parts])
        return self._forward(ids, positions, attend)

    def decode(self, caches: Sequence[KVCache], ids: _Ids, positions: Sequence[int]) -> Tensor:
        """Compute one token of each sequence: `ids[i]` at `positions[i]`, with the cache
        `caches[i]`. The cache contains the keys and values of all earlier tokens, and has room for
        those of this token. Return the final hidden states.
        """

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # one vector-matrix product per query is faster than one product of two matrices
            grouped = self._grouped(queries)[..., None, :]
            scores = np.full((*grouped.shape[:-1], max(positions) + 1), -np.inf, np.float32)
            for row, (cache, position) in enumerate(zip(caches, positions, strict=True)):
                layer_cache = cache.keys[layer]
                layer_cache[..., position] = keys[row]
                np.matmul(
                    grouped[row],
                    layer_cache[:, None, :, : position + 1],
                    out=scores[row, ..., : position + 1],
                )
            totals = _exponentiate(scores)
            for row, (cache, position) in enumerate(zip(caches, positions, strict=True)):
                layer_cache = cache.values[layer]
                layer_cache[:, position] = values[row]
                np.matmul(
                    scores[row, ..., : position + 1],
                    layer_cache[:, None, : position + 1],
                    out=grouped[row],
                )
            grouped /= totals
            return grouped.reshape(queries.shape)

        return self._forward(ids, np.array(positions), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits for final hidden states: (tokens, vocabulary)."""
        logits: Tensor = hidden @ self._weights.head
        return logits

    def _forward(self, ids: _Ids, positions: npt.NDArray[np.int64], attend: _Attend) -> Tensor:
        angles = (positions.astype(np.float32)[:, None] * self.frequencies)[:, None]
        cosine, sine = np.cos(angles), np.sin(angles)
        rotated = self._heads + self._kv_heads
        x = self._weights.embedding[ids]
        for number, layer in enumerate(self._weights.layers):
            qkv = (self._normed(x, layer.attention_norm) @ layer.qkv).reshape(
                len(ids), -1, self._width
            )
            turned = _rotate(qkv[:, :rotated], cosine, sine)
            mixed = attend(
                number, turned[:, : self._heads], turned[:, self._heads :], qkv[:, rotated:]
            )
            x += mixed.reshape(len(ids), -1) @ layer.output
            gate_up = self._normed(x, layer.mlp_norm) @ layer.gate_up
            half = gate_up.shape[1] // 2
            x += (_silu(gate_up[:, :half]) * gate_up[:, half:]) @ layer.down
        return self._normed(x, self._weights.norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        squares = (x * x).sum(axis=-1, keepdims=True)
        normed: Tensor = x / np.sqrt(squares / x.shape[1] + self.config.rms_norm_eps) * weight
        return normed

    def _grouped(self, queries: Tensor) -> Tensor:
        """Return scaled queries, grouped by key head: (tokens, key heads, queries per key head,
        head_dim).
        """
        shape = (len(queries), self._kv_heads, -1, self._width)
        grouped: Tensor = queries.reshape(shape) * self._scale
        return grouped

    def _attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, end: int) -> Tensor:
        """Return the attention output of `queries`, which are (tokens, heads, head_dim). They
        belong to the last tokens before the position `end` of one sequence. `keys` and `values`
        come from one layer of the sequence's cache.
        """
        grouped = self._grouped(queries)
        attended = np.empty_like(grouped)
        for start in range(0, len(queries), _QUERY_BLOCK):
            block = grouped[start : start + _QUERY_BLOCK].transpose(1, 2, 0, 3)
            size = block.shape[2]
            seen = end - len(queries) + start + size
            scores = block @ keys[:, None, :, :seen]
            later = np.triu(np.ones((size, size), bool), 1)
            scores[..., seen - size :][..., later] = -np.inf
            totals = _exponentiate(scores)
            mixed = scores @ values[:, None, :seen] / totals
            attended[start : start + size] = mixed.transpose(2, 0, 1, 3)
        return attended.reshape(queries.shape)


def _exponentiate(scores: Tensor) -> Tensor:
    """Replace the scores with softmax's numerators (last axis). Return the denominators."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    totals: Tensor = scores.sum(axis=-1, keepdims=True)
    return totals


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply the rotary position embedding to queries or keys."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = np.empty_like(x)
    np.subtract(first * cosine, second * sine, out=turned[..., :half])
    np.add(second * cosine, first * sine, out=turned[..., half:])
    return turned


def _silu(x: Tensor) -> Tensor:
    activated = np.empty_like(x)
    with np.errstate(over="ignore"):  # exp is inf for a large negative x, and x / inf is 0
        np.divide(x, 1 + np.exp(-x), out=activated)
    return activated


class KVCache:
    """The keys and values of one sequence, in two arrays. `keys` is (layers, heads, head_dim,
    positions), and `values` is (layers, heads, positions, head_dim). With these orders, attention
    from one token reads memory from start to end.
    """

    def __init__(self, config: LlamaConfig, positions: int) -> None:
        outer = (config.num_hidden_layers, config.num_key_value_heads)
        self.keys: Tensor = np.empty((*outer, config.head_dim, positions), np.float32)
        self.values: Tensor = np.empty((*outer, positions, config.head_dim), np.float32)

    @property
    def positions(self) -> int:
        """The number of positions for which there is room."""
        positions: int = self.values.shape[2]
        return positions

    def reserve(self, positions: int) -> None:
        """Make room for `positions` tokens. It grows by half each time, so copies are rare."""
        layers, heads, room, width = self.values.shape
        if positions > room:
            old_keys, old_values, grown = self.keys, self.values, max(positions, room * 3 // 2)
            self.keys = np.empty((layers, heads, width, grown), np.float32)
            self.values = np.empty((layers, heads, grown, width), np.float32)
            self.keys[..., :room] = old_keys
            self.values[..., :room, :] = old_values

    def copy_from(self, other: KVCache, length: int) -> None:
        """Copy the first `length` positions of another sequence."""
        self.reserve(length)
        self.keys[..., :length] = other.keys[..., :length]
        self.values[..., :length, :] = other.values[..., :length, :]
