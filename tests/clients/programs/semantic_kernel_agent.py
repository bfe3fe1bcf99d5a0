"""Semantic Kernel's agent of each of OpenAI's APIs."""

from typing import Any

from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Tools:
    """A plugin with the one tool."""

    look = staticmethod(kernel_function(name="look")(look))


def agent(client: AsyncOpenAI) -> Any:
    options = {"name": "looker", "instructions": SYSTEM, "plugins": [Tools()]}
    if DIALECT == "responses":
        return OpenAIResponsesAgent(ai_model_id="m", client=client, **options)
    service = OpenAIChatCompletion(ai_model_id="m", async_client=client)
    return ChatCompletionAgent(service=service, **options)


@run
async def main() -> object:
    looker = agent(AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY))
    if STREAM:
        return "".join([str(item.message) async for item in looker.invoke_stream(TASK)])
    return (await looker.get_response(TASK)).message
