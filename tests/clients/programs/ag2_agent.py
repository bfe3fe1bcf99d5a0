"""AG2's agent with its configuration of each dialect."""

from ag2 import Agent
from ag2.config import AnthropicConfig, ModelConfig, OpenAIConfig, OpenAIResponsesConfig
from common import DIALECT, KEY, STREAM, SYSTEM, TASK, URL, look, run


def config() -> ModelConfig:
    options = {"api_key": KEY, "streaming": STREAM}
    if DIALECT == "messages":
        return AnthropicConfig("m", base_url=URL, **options)
    kind = OpenAIResponsesConfig if DIALECT == "responses" else OpenAIConfig
    return kind("m", base_url=f"{URL}/v1", **options)


@run
async def main() -> object:
    return (await Agent("looker", SYSTEM, config=config(), tools=[look]).ask(TASK)).body
