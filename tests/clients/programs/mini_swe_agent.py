"""mini-swe-agent's default agent, with its models for litellm."""

from __future__ import annotations

import os

# read when the packages are imported
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
}

from common import DIALECT, KEY, SYSTEM, TASK, URL, run
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel


async def main() -> object:
    kind = LitellmResponseModel if DIALECT == "responses" else LitellmModel
    messages = DIALECT == "messages"
    model = kind(
        model_name="anthropic/m" if messages else "openai/m",
        model_kwargs={"api_base": URL if messages else f"{URL}/v1", "api_key": KEY},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model, LocalEnvironment(), system_template=SYSTEM, instance_template="{{ task }}"
    )
    return agent.run(TASK)["submission"]


run(main)
