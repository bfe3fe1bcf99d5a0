"""CAMEL's chat agent with its model class for servers like OpenAI's."""

from camel.agents import ChatAgent
from camel.models import BaseModelBackend, ModelFactory
from camel.toolkits import FunctionTool
from camel.utils import BaseTokenCounter
from common import KEY, STREAM, SYSTEM, TASK, URL, look, run


class Nothing(BaseTokenCounter):
    """CAMEL would download a vocabulary to count tokens."""

    def count_tokens_from_messages(self, messages: object) -> int:
        return 0

    def encode(self, text: str) -> list[int]:
        return []

    def decode(self, token_ids: list[int]) -> str:
        return ""


def model() -> BaseModelBackend:
    return ModelFactory.create(
        "openai-compatible-model",
        "m",
        {"stream": STREAM},
        token_counter=Nothing(),
        api_key=KEY,
        url=f"{URL}/v1",
    )


@run
async def main() -> object:
    agent = ChatAgent(SYSTEM, model(), tools=[FunctionTool(look)], stream_accumulate=True)
    response = await agent.astep(TASK)
    if STREAM:
        async for last in response:
            response = last
    return response.msgs[0].content
