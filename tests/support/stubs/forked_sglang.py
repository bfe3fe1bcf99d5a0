"""`python -m forked_sglang`: SGLang's command, whose processes are forked.

SGLang starts its scheduler and its detokenizer as new interpreters, and the scheduler imports all
its models. Each import takes longer than everything else that happens until the server answers.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pkgutil
import runpy
from importlib import import_module

MODELS = "sglang.srt.models"
IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    MODELS,
)
SERVED = {"llama", "qwen2", "qwen3_moe"}
"""The modules of the models that the tests serve."""


def set_start_method(method: str, *, force: bool) -> None:
    """Leave the method at `fork`, although SGLang sets another."""
    assert (method, force) == ("spawn", True)


if __name__ == "__main__":
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
