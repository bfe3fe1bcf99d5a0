"""pydantic-ai's agent with its model class of each dialect."""

from common import BASE, KEY, STREAM, SYSTEM, TASK, chosen, look, run
from pydantic_ai import Agent, AgentRunResultEvent

KIND = chosen(
    chat="pydantic_ai.models.openai:OpenAIChatModel",
    responses="pydantic_ai.models.openai:OpenAIResponsesModel",
    messages="pydantic_ai.models.anthropic:AnthropicModel",
)
OPENAI = "pydantic_ai.providers.openai:OpenAIProvider"
PROVIDER = chosen(
    chat=OPENAI, responses=OPENAI, messages="pydantic_ai.providers.anthropic:AnthropicProvider"
)


@run
async def main() -> object:
    model = KIND("m", provider=PROVIDER(base_url=BASE, api_key=KEY))
    agent = Agent(model, instructions=SYSTEM, tools=[look])
    if STREAM:
        async with agent.run_stream_events(TASK) as events:
            async for event in events:
                if isinstance(event, AgentRunResultEvent):
                    return event.result.output
    return (await agent.run(TASK)).output
