"""airline: one split."""

from __future__ import annotations

from support.tau_mini.envs.base import Env
from support.tau_mini.envs.shop import TOOLS, load, tasks

SPLITS = {"test": tasks(6, 6)}


def make(strategy: str, model: str, split: str, provider: str | None, index: int | None) -> Env:
    if split not in SPLITS:
        raise ValueError(f"no split {split}")
    env = Env(
        load, TOOLS, SPLITS[split], "# Shop policy\nBe kind.", (strategy, model, provider), index
    )
    env.terminate_tools = ["transfer_to_human_agents"]
    return env
