"""How AReaL 1.0.4 makes a group of episodes (`GroupedRolloutWorkflow`, `WorkflowExecutor`) and
normalizes its rewards (`Normalization` of the levels "group"), copied without what is not used.

`tests/contract/test_trainer_types.py` compares it with AReaL's own code if AReaL is installed.
"""

from __future__ import annotations

import asyncio
from typing import Any


async def execute(workflow: Any, engine: Any, data: dict[str, Any]) -> Any:
    """Of `WorkflowExecutor._execute_workflow`: an error rejects what `workflow` returns."""
    try:
        return await workflow.arun_episode(engine, data)
    except Exception:
        return None


class GroupedRolloutWorkflow:
    def __init__(self, workflow: Any, group_size: int, concat: Any = list) -> None:
        self.workflow = workflow
        self.group_size = group_size
        self.concat = concat

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        results = await asyncio.gather(
            *[self.workflow.arun_episode(engine, data) for _ in range(self.group_size)]
        )
        valid_results = [r for r in results if r is not None]
        return self.concat(valid_results) if valid_results else None


def normalized(x: Any, group_size: int, eps: float = 1e-5) -> Any:
    """Of `Normalization.__call__`, with the mean and the unbiased deviation of each group."""
    import torch

    mean, std = torch.zeros_like(x), torch.zeros_like(x)
    for i in range(len(x) // group_size):
        s = slice(i * group_size, (i + 1) * group_size)
        mean[s] = x[s].double().mean()
        std[s] = x[s].double().std(unbiased=True)
    return ((x - mean) / (std + eps)).float()
