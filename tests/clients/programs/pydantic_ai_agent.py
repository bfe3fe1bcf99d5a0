"""pydantic-ai's agent with its model class of each dialect."""

from __future__ import annotations

from typing import Any

from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run
from pydantic_ai import Agent, AgentRunResultEvent


def model() -> Any:
    if DIALECT == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel("m", provider=AnthropicProvider(base_url=URL, api_key=KEY))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    kind = OpenAIResponsesModel if DIALECT == "responses" else OpenAIChatModel
    return kind("m", provider=provider)


async def main() -> object:
    agent = Agent(model(), instructions=SYSTEM, tools=[look])
    if STREAM:
        async with agent.run_stream_events(TASK) as events:
            async for event in events:
                if isinstance(event, AgentRunResultEvent):
                    return event.result.output
    return (await agent.run(TASK)).output


run(main)
