"""mini-swe-agent's default agent, with its models for litellm."""

import os

# read when the packages are imported
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
}

from common import BASE, DIALECT, KEY, LITELLM, SYSTEM, TASK, run
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel


@run
async def main() -> object:
    kind = LitellmResponseModel if DIALECT == "responses" else LitellmModel
    model = kind(
        model_name=LITELLM,
        model_kwargs={"api_base": BASE, "api_key": KEY},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model, LocalEnvironment(), system_template=SYSTEM, instance_template="{{ task }}"
    )
    return agent.run(TASK)["submission"]
