"""autogen's assistant with its client of each dialect."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run

INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=False,
    family="unknown",
    structured_output=False,
)


def client() -> Any:
    if DIALECT == "messages":
        from autogen_ext.models.anthropic import AnthropicChatCompletionClient

        return AnthropicChatCompletionClient(model="m", base_url=URL, api_key=KEY, model_info=INFO)
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    return OpenAIChatCompletionClient(model="m", base_url=f"{URL}/v1", api_key=KEY, model_info=INFO)


async def main() -> object:
    agent = AssistantAgent(
        "looker",
        client(),
        tools=[look],
        system_message=SYSTEM,
        max_tool_iterations=9,
        model_client_stream=STREAM,
    )
    return (await agent.run(task=TASK)).messages[-1].to_text()


run(main)
