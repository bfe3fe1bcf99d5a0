"""deepagents' agent, with langchain's model of each dialect."""

from __future__ import annotations

from typing import Any

from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run
from deepagents import create_deep_agent


def model() -> Any:
    if DIALECT == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model="m", base_url=URL, api_key=KEY, max_tokens=1000)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="m", base_url=f"{URL}/v1", api_key=KEY, use_responses_api=DIALECT == "responses"
    )


async def main() -> object:
    agent = create_deep_agent(model(), [look], system_prompt=SYSTEM)
    task = {"messages": [("user", TASK)]}
    if STREAM:
        async for _, state in agent.astream(task, stream_mode=["values", "messages"]):
            if isinstance(state, dict):
                last = state["messages"][-1]
        return last.text
    return (await agent.ainvoke(task))["messages"][-1].text


run(main)
