"""OpenAI's agents SDK with its model class of each dialect."""

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run
from openai import AsyncOpenAI


def model() -> Model:
    kind = OpenAIResponsesModel if DIALECT == "responses" else OpenAIChatCompletionsModel
    return kind("m", AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY))


@run
async def main() -> object:
    set_tracing_disabled(True)
    agent = Agent("looker", instructions=SYSTEM, tools=[function_tool(look)], model=model())
    if not STREAM:
        return (await Runner.run(agent, TASK)).final_output
    result = Runner.run_streamed(agent, TASK)
    async for _ in result.stream_events():
        pass
    return result.final_output
