"""Call slime's hooks for finished samples (`--rollout-sample-hook-path`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from toolroll.rollout.adapters.slime.settings import attribute


async def with_sample_hooks(args: Any, made: Any, *, evaluation: bool) -> Any:
    """Pass `made`, a sample or a list of samples, to the hooks, and return their result."""
    if not attribute(args, "rollout_sample_hook_path"):
        return made
    return await import_module("slime.rollout.sample_hooks").apply_rollout_sample_hooks(
        args, made, evaluation=evaluation
    )
