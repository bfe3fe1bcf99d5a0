"""agno's agent with its model class of each dialect."""

from __future__ import annotations

from typing import Any

from agno.agent import Agent
from agno.run.agent import RunErrorEvent
from agno.run.base import RunStatus
from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, Reported, look, run


def model() -> Any:
    if DIALECT == "messages":
        from agno.models.anthropic import Claude

        return Claude(id="m", api_key=KEY, client_params={"base_url": URL})
    if DIALECT == "responses":
        from agno.models.openai import OpenAIResponses

        return OpenAIResponses(id="m", api_key=KEY, base_url=f"{URL}/v1")
    from agno.models.openai import OpenAIChat

    return OpenAIChat(id="m", api_key=KEY, base_url=f"{URL}/v1")


async def main() -> object:
    agent = Agent(model=model(), tools=[look], system_message=SYSTEM, telemetry=False)
    if STREAM:
        async for event in agent.arun(TASK, stream=True, stream_events=True, yield_run_output=True):
            result = event
    else:
        result = await agent.arun(TASK)
    # agno raises nothing: the error's text is the content
    if isinstance(result, RunErrorEvent) or result.status == RunStatus.error:
        raise Reported("status ERROR")
    return result.content


run(main)
