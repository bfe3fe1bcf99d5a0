"""deepagents' agent, with langchain's model of each dialect."""

from common import SYSTEM, look, run
from deepagents import create_deep_agent
from langchain_parts import answer, model


@run
async def main() -> object:
    return await answer(create_deep_agent(model(), [look], system_prompt=SYSTEM))
