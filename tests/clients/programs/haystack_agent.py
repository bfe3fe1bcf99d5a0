"""haystack's agent over chat completions."""

from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret


@run
async def main() -> object:
    kind = OpenAIResponsesChatGenerator if DIALECT == "responses" else OpenAIChatGenerator
    generator = kind(model="m", api_base_url=f"{URL}/v1", api_key=Secret.from_token(KEY))
    agent = Agent(
        chat_generator=generator, tools=[create_tool_from_function(look)], system_prompt=SYSTEM
    )

    async def ignore(chunk: object) -> None:
        pass

    result = await agent.run_async(
        messages=[ChatMessage.from_user(TASK)], streaming_callback=ignore if STREAM else None
    )
    return result["last_message"].text
