"""What the agents that are built on langchain share: its model of each dialect, and a run."""

from typing import Any

from common import BASE, DIALECT, KEY, STREAM, TASK, chosen

OPENAI = "langchain_openai:ChatOpenAI"
KIND = chosen(chat=OPENAI, responses=OPENAI, messages="langchain_anthropic:ChatAnthropic")
OPENAI_OPTIONS = {"use_responses_api": DIALECT == "responses"}
OPTIONS = {"max_tokens": 1000} if DIALECT == "messages" else OPENAI_OPTIONS


def model() -> Any:
    return KIND(model="m", base_url=BASE, api_key=KEY, **OPTIONS)


async def answer(agent: Any) -> object:
    task = {"messages": [("user", TASK)]}
    if STREAM:
        async for _, state in agent.astream(task, stream_mode=["values", "messages"]):
            if isinstance(state, dict):
                last = state["messages"][-1]
        return last.text
    return (await agent.ainvoke(task))["messages"][-1].text
