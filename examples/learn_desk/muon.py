"""Muon for the matrices of the network, AdamW for its embedding and its norms.

Muon (Jordan et al., 2024) makes the momentum of a matrix orthogonal before the step. Small networks
learn to copy in fewer steps with it. `torch.optim.Muon` computes in bfloat16, which CPUs do slowly.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from examples.learn_desk.network import Network
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """`lr` is the root mean square of a step's entries, as AdamW's is about."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    def step(self, closure: Any = None) -> Any:
        """Make a step. Matrices of one shape are computed together. `closure` is not called."""
        with torch.no_grad():
            for group in self.param_groups:
                shapes: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
                for matrix in group["params"]:
                    shapes[matrix.shape].append(matrix)
                for shape, matrices in shapes.items():
                    moved = torch.stack([self._moved(one, group["momentum"]) for one in matrices])
                    scale = group["lr"] * 0.2 * max(shape) ** 0.5
                    for one, change in zip(matrices, _orthogonal(moved), strict=True):
                        one.add_(change, alpha=-scale)

    def _moved(self, matrix: Tensor, momentum: float) -> Tensor:
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        moment = state["momentum"]
        assert matrix.grad is not None
        moment.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(moment, momentum)


def _orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest matrices with equal singular values, by a Newton-Schulz iteration."""
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    x = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide is matrices else x.mT


def optimizers(network: Network) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the matrices and of the other parameters."""
    matrices = [one for name, one in network.named_parameters() if _is_matrix(name, one)]
    others = [one for name, one in network.named_parameters() if not _is_matrix(name, one)]
    adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(matrices, lr=0.0), adam]


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "embed" not in name
