"""Replace SGLang's compiled kernels, whose wheels are CUDA only: every name exists, and raises when
called.

SGLang 0.5.23 imports names from it when its CPU engine starts; a dense model with torch attention
calls none of them.
"""

from collections.abc import Callable
from typing import Any

import torch


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} is a stub: there is no kernel on this machine")

    missing.__name__ = name
    return missing


class _HostMemory:
    """CUDA's runtime as far as SGLang locks pages for the routed experts, also on a CPU."""

    @staticmethod
    def cudaHostRegister(*range: int) -> int:
        return 0


torch.cuda.cudart = lambda: _HostMemory


def _pageable(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` without its option to lock pages, which needs a GPU. LoRA asks for it on a CPU too."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made


torch.tensor, torch.zeros = _pageable(torch.tensor), _pageable(torch.zeros)
torch.Tensor.pin_memory = lambda tensor: tensor
