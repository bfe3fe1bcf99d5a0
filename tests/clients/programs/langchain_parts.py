"""What the agents that are built on langchain share: its model of each dialect, and a run."""

from __future__ import annotations

from typing import Any

from common import DIALECT, KEY, STREAM, TASK, URL


def model() -> Any:
    if DIALECT == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model="m", base_url=URL, api_key=KEY, max_tokens=1000)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="m", base_url=f"{URL}/v1", api_key=KEY, use_responses_api=DIALECT == "responses"
    )


async def answer(agent: Any) -> object:
    task = {"messages": [("user", TASK)]}
    if STREAM:
        async for _, state in agent.astream(task, stream_mode=["values", "messages"]):
            if isinstance(state, dict):
                last = state["messages"][-1]
        return last.text
    return (await agent.ainvoke(task))["messages"][-1].text
