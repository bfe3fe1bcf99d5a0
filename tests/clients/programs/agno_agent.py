"""agno's agent with its model class of each dialect."""

from agno.agent import Agent
from agno.run.agent import RunErrorEvent
from agno.run.base import RunStatus
from common import BASE, DIALECT, KEY, STREAM, SYSTEM, TASK, Reported, chosen, look, run

KIND = chosen(
    chat="agno.models.openai:OpenAIChat",
    responses="agno.models.openai:OpenAIResponses",
    messages="agno.models.anthropic:Claude",
)
ADDRESS = {"base_url": BASE}


@run
async def main() -> object:
    where = {"client_params": ADDRESS} if DIALECT == "messages" else ADDRESS
    model = KIND(id="m", api_key=KEY, **where)
    agent = Agent(model=model, tools=[look], system_message=SYSTEM, telemetry=False)
    if STREAM:
        async for event in agent.arun(TASK, stream=True, stream_events=True, yield_run_output=True):
            result = event
    else:
        result = await agent.arun(TASK)
    # agno raises nothing: the error's text is the content
    if isinstance(result, RunErrorEvent) or result.status == RunStatus.error:
        raise Reported("status ERROR")
    return result.content
