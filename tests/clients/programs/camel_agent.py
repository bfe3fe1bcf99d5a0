"""CAMEL's chat agent with its model class of each dialect."""

from __future__ import annotations

from camel.agents import ChatAgent
from camel.models import BaseModelBackend, ModelFactory
from camel.toolkits import FunctionTool
from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run


def model() -> BaseModelBackend:
    messages = DIALECT == "messages"
    return ModelFactory.create(
        "anthropic" if messages else "openai-compatible-model",
        "m",
        {"stream": STREAM},
        api_key=KEY,
        url=URL if messages else f"{URL}/v1",
    )


async def main() -> object:
    agent = ChatAgent(SYSTEM, model(), tools=[FunctionTool(look)], stream_accumulate=True)
    response = await agent.astep(TASK)
    if STREAM:
        async for last in response:
            response = last
    return response.msgs[0].content


run(main)
