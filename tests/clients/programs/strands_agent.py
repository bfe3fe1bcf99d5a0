"""strands' agent with its model class of each dialect."""

from __future__ import annotations

from typing import Any

from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run
from strands import Agent, tool


def model() -> Any:
    if DIALECT == "messages":
        from strands.models.anthropic import AnthropicModel

        return AnthropicModel(
            client_args={"base_url": URL, "api_key": KEY}, model_id="m", max_tokens=1000
        )
    options = {"client_args": {"base_url": f"{URL}/v1", "api_key": KEY}, "model_id": "m"}
    if DIALECT == "responses":
        from strands.models.openai_responses import OpenAIResponsesModel

        return OpenAIResponsesModel(**options)
    from strands.models.openai import OpenAIModel

    return OpenAIModel(**options, streaming=STREAM)


async def main() -> object:
    agent = Agent(model=model(), tools=[tool(look)], system_prompt=SYSTEM, callback_handler=None)
    return await agent.invoke_async(TASK)


run(main)
