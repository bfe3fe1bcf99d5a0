"""browser-use's model class, without a browser: two structured answers."""

import os

# read when the package is imported
os.environ |= {"ANONYMIZED_TELEMETRY": "false", "BROWSER_USE_CLOUD_SYNC": "false"}

from browser_use.llm import AssistantMessage, ChatOpenAI, SystemMessage, UserMessage
from common import KEY, SYSTEM, TASK, URL, run
from pydantic import BaseModel


class Step(BaseModel):
    at: str


@run
async def main() -> object:
    model = ChatOpenAI("m", base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    messages = [SystemMessage(content=SYSTEM), UserMessage(content=TASK)]
    step = (await model.ainvoke(messages, Step)).completion
    messages += [AssistantMessage(content=step.model_dump_json()), UserMessage(content="And now?")]
    return (await model.ainvoke(messages, Step)).completion.at
