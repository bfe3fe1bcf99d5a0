"""google-adk's agent through its model class for litellm."""

from __future__ import annotations

from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, Reported, look, run
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


async def main() -> object:
    if DIALECT == "messages":
        model = LiteLlm("anthropic/m", api_base=URL, api_key=KEY)
    else:
        model = LiteLlm("openai/m", api_base=f"{URL}/v1", api_key=KEY)
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


run(main)
