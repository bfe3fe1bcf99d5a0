"""CrewAI's agent, with one task."""

import os

# read when the package is imported
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"}

from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run
from crewai import LLM, Agent
from crewai.events.utils.console_formatter import set_suppress_console_output
from crewai.tools import tool


def model() -> LLM:
    options = {"api_key": KEY, "stream": STREAM}
    if DIALECT == "messages":
        return LLM("m", provider="anthropic", base_url=URL, **options)
    api = "responses" if DIALECT == "responses" else "completions"
    return LLM("m", provider="openai", base_url=f"{URL}/v1", api=api, **options)


@run
async def main() -> object:
    set_suppress_console_output(True)  # it would be written after the answer too
    agent = Agent(
        role="looker", goal=SYSTEM, backstory="You look.", tools=[tool(look)], llm=model()
    )
    return (await agent.kickoff_async(TASK)).raw
