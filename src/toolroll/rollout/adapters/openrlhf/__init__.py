"""OpenRLHF: an `AgentExecutor` for `--train.agent_func_path` that runs any OpenAI SDK agent."""

from toolroll.rollout.adapters.openrlhf.executor import AgentExecutor
from toolroll.rollout.adapters.openrlhf.vllm_engine import VllmEngine

__all__ = ["AgentExecutor", "VllmEngine"]
