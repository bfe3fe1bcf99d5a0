"""langgraph's prebuilt agent, with langchain's model of each dialect."""

from common import SYSTEM, look, run
from langchain_parts import answer, model
from langgraph.prebuilt import create_react_agent


@run
async def main() -> object:
    return await answer(create_react_agent(model(), [look], prompt=SYSTEM))
