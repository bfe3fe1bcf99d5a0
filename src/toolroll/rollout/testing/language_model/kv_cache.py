"""`KVCache`: the keys and values of one sequence."""

from __future__ import annotations

import numpy as np

from toolroll.rollout.testing.language_model.config import LlamaConfig
from toolroll.rollout.testing.language_model.weights import Tensor


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
        """Make room for `positions` tokens. The room grows by half each time, so that copies are
        rare.
        """
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
