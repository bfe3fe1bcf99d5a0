"""autogen's assistant with its client of each dialect."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from common import BASE, KEY, STREAM, SYSTEM, TASK, chosen, look, run

KIND = chosen(
    chat="autogen_ext.models.openai:OpenAIChatCompletionClient",
    messages="autogen_ext.models.anthropic:AnthropicChatCompletionClient",
)
INFO = ModelInfo(
    family="unknown",
    function_calling=True,
    **dict.fromkeys(("vision", "json_output", "structured_output"), False),
)


@run
async def main() -> object:
    agent = AssistantAgent(
        "looker",
        KIND(model="m", base_url=BASE, api_key=KEY, model_info=INFO),
        tools=[look],
        system_message=SYSTEM,
        max_tool_iterations=9,
        model_client_stream=STREAM,
    )
    return (await agent.run(task=TASK)).messages[-1].to_text()
