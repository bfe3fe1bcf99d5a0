"""strands' agent with its model class of each dialect."""

from common import BASE, DIALECT, KEY, STREAM, SYSTEM, TASK, chosen, look, run
from strands import Agent, tool

KIND = chosen(
    chat="strands.models.openai:OpenAIModel",
    responses="strands.models.openai_responses:OpenAIResponsesModel",
    messages="strands.models.anthropic:AnthropicModel",
)
OPTIONS = {"chat": {"streaming": STREAM}, "messages": {"max_tokens": 1000}}.get(DIALECT, {})


@run
async def main() -> object:
    model = KIND(client_args={"base_url": BASE, "api_key": KEY}, model_id="m", **OPTIONS)
    agent = Agent(model=model, tools=[tool(look)], system_prompt=SYSTEM, callback_handler=None)
    return await agent.invoke_async(TASK)
