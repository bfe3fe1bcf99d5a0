"""smolagents' agent with tools."""

from common import KEY, STREAM, TASK, URL, run
from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def look(at: str) -> str:
    """Look at something.

    Args:
        at: What to look at.
    """
    return f"seen {at}"


@run
async def main() -> object:
    model = OpenAIModel("m", api_base=f"{URL}/v1", api_key=KEY)
    return ToolCallingAgent([look], model, stream_outputs=STREAM).run(TASK)
