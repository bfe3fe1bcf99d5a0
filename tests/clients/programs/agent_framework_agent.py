"""Microsoft's agent-framework with its client of each dialect."""

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run


@run
async def main() -> object:
    kind = OpenAIChatClient if DIALECT == "responses" else OpenAIChatCompletionClient
    agent = Agent(kind("m", api_key=KEY, base_url=f"{URL}/v1"), SYSTEM, tools=[look])
    if not STREAM:
        return (await agent.run(TASK)).text
    stream = agent.run(TASK, stream=True)
    async for _ in stream:
        pass
    return (await stream.get_final_response()).text
