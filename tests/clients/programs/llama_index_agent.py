"""llama-index's function agent."""

from typing import Any

from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool


def model() -> Any:
    options = {"model": "m", "api_base": f"{URL}/v1", "api_key": KEY}
    if DIALECT == "responses":
        from llama_index.llms.openai import OpenAIResponses

        return OpenAIResponses(**options, context_window=1000)
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(**options, is_chat_model=True, is_function_calling_model=True)


@run
async def main() -> object:
    tool = FunctionTool.from_defaults(look)
    agent = FunctionAgent(tools=[tool], llm=model(), system_prompt=SYSTEM, streaming=STREAM)
    return await agent.run(TASK)
