"""Environments by name."""

from importlib import import_module
from typing import Any

from support.tau_mini.envs.base import Env


def get_env(
    env_name: str,
    user_strategy: str,
    user_model: str,
    task_split: str,
    user_provider: str | None = None,
    task_index: int | None = None,
) -> Env:
    if env_name not in ("retail", "airline"):
        raise ValueError(f"no environment {env_name}")
    module: Any = import_module(f"support.tau_mini.envs.{env_name}.env")
    env: Env = module.make(user_strategy, user_model, task_split, user_provider, task_index)
    return env
