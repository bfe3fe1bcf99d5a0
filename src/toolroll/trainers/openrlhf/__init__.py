"""OpenRLHF: an `AgentExecutor` for `--train.agent_func_path` that runs any OpenAI SDK agent."""

from toolroll.trainers.openrlhf.executor import AgentExecutor
from toolroll.trainers.openrlhf.vllm_engine import VllmEngine

__all__ = ["AgentExecutor", "VllmEngine"]
