"""Qwen-Agent's assistant with the server's own function calls."""

import json
from typing import ClassVar

from common import KEY, SYSTEM, TASK, URL, run
from common import look as seen
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool


class Look(BaseTool):
    name = "look"
    description = "Look at something."
    parameters: ClassVar = {
        "type": "object",
        "properties": {"at": {"type": "string"}},
        "required": ["at"],
    }

    def call(self, params: str, **_: object) -> str:
        return seen(json.loads(params)["at"])


@run
async def main() -> object:
    model = {
        "model": "m",
        "model_type": "oai",
        "model_server": f"{URL}/v1",
        "api_key": KEY,
        "generate_cfg": {"use_raw_api": True, "max_retries": 0},
    }
    agent = Assistant([Look()], model, SYSTEM)
    for messages in agent.run([{"role": "user", "content": TASK}]):
        last = messages[-1]
    return last["content"]
