"""google-adk's agent through its model class for litellm."""

from common import BASE, KEY, LITELLM, STREAM, SYSTEM, TASK, Reported, look, run
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


@run
async def main() -> object:
    model = LiteLlm(LITELLM, api_base=BASE, api_key=KEY)
    agent = LlmAgent(name="looker", model=model, instruction=SYSTEM, tools=[look])
    runner = InMemoryRunner(agent=agent, app_name="looking")
    session = await runner.session_service.create_session(app_name="looking", user_id="u")
    async for event in runner.run_async(
        user_id="u",
        session_id=session.id,
        new_message=types.Content(role="user", parts=[types.Part(text=TASK)]),
        run_config=RunConfig(streaming_mode=StreamingMode.SSE if STREAM else StreamingMode.NONE),
    ):
        last = event
    if last.error_code:
        raise Reported(str(last.error_code))
    return "".join(part.text or "" for part in last.content.parts)
