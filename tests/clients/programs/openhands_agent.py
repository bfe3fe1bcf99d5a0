"""OpenHands' agent with a tool of ours and its model class for litellm."""

from __future__ import annotations

import os

# read when the packages are imported
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}

from common import BASE, KEY, LITELLM, STREAM, SYSTEM, TASK, look, run
from openhands.sdk import (
    LLM,
    Action,
    Agent,
    Conversation,
    Observation,
    Tool,
    ToolDefinition,
    register_tool,
)
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.sdk.tool import ToolExecutor


class LookAction(Action):
    at: str


class Seen(Observation):
    pass


class Looker(ToolExecutor):
    def __call__(self, action: LookAction, conversation: object = None) -> Seen:
        return Seen.from_text(look(action.at))


class LookTool(ToolDefinition[LookAction, Seen]):
    name = "look"

    @classmethod
    def create(cls, conv_state: object = None) -> list[LookTool]:
        look = "Look at something."
        types = {"action_type": LookAction, "observation_type": Seen}
        return [cls(description=look, executor=Looker(), **types)]


@run
async def main() -> object:
    model = LLM(model=LITELLM, base_url=BASE, api_key=KEY, stream=STREAM, num_retries=0)
    register_tool("LookTool", LookTool)
    tools = [Tool(name="LookTool")]
    agent = Agent(llm=model, tools=tools, include_default_tools=[], system_prompt=SYSTEM)
    conversation = Conversation(
        agent, workspace=".", visualizer=None, token_callbacks=[lambda chunk: None]
    )
    conversation.send_message(TASK)
    conversation.run()
    return get_agent_final_response(conversation.state.events)
