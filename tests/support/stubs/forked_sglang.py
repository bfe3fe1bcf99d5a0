"""`python -m forked_sglang`: SGLang's command, whose processes are forked.

SGLang starts its scheduler and its detokenizer as new interpreters, and the scheduler imports all
its models. Each import takes longer than everything else that happens until the server answers.
"""

import gc
import multiprocessing
import os
import pkgutil
import runpy
from importlib import import_module

import torch

MODELS = "sglang.srt.models"
IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    MODELS,
)
SERVED = {"llama", "qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3_moe", "qwen3_vl"}
"""The modules of the models that the tests serve."""

KERNELS = (
    "sigmoid_mul",
    "qk_gemma_rmsnorm",
    "qk_gemma_rmsnorm_with_gate",
    "qkvzba_split_reshape_cat_contiguous",
)
LIBRARIES: list[torch.library.Library] = []
"""Operators are defined as long as their library lives."""


def set_start_method(method: str, *, force: bool) -> None:
    """Leave the method at `fork`, although SGLang sets another."""
    assert (method, force) == ("spawn", True)


def define_operators() -> None:
    """Define what torchvision's wheel and SGLang's image models look for when they are imported:
    operators of compiled kernels, which no test calls.
    """
    boxes = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        boxes.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kernels = torch.library.Library("sgl_kernel", "DEF")
    for name in KERNELS:
        kernels.define(f"fused_{name}_cpu(Tensor x) -> Tensor")
    LIBRARIES.extend([boxes, kernels])


if __name__ == "__main__":
    define_operators()
    gc.disable()  # it would visit all that is imported again and again
    *_, models = map(import_module, IMPORTED)
    gc.enable()
    gc.freeze()
    names = {module.name for module in pkgutil.iter_modules(models.__path__)}
    assert names >= SERVED
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(names - SERVED))
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = set_start_method
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
