"""An agent of the OpenAI Agents SDK, as anybody would write it, played against `toolroll serve`:
its runs come out as training data.

    toolroll serve --model MODEL --engine http://127.0.0.1:30000 --parser qwen25    # in front of SGLang
    python examples/openai_agents/looker.py --url http://127.0.0.1:8400

Nothing in the agent knows of toolroll: it is given an address. What is trained is asked for
afterwards, by the session's name.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import httpx
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

ROOMS = {
    "kitchen": "A cold stove, and a note: 'the key is in the garden'.",
    "garden": "Roses, and a key under the third pot.",
}


# strict calls are sampled under a grammar: not what the model samples by itself
@function_tool(strict_mode=False)
def look(at: str) -> str:
    """Look at a room of the house."""
    return ROOMS.get(at, f"There is no {at} here.")


def an_agent(client: AsyncOpenAI, model: str = "default") -> Agent:
    """The agent. Only `client` says where its model is served."""
    return Agent(
        name="finder",
        instructions="You look for the key in a house. Look at rooms, then say where the key is.",
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        tools=[look],
    )


def grade(answer: str) -> float:
    """1.0 where the agent found the key."""
    return float("third pot" in answer)


async def play(url: str, session: str) -> dict[str, Any]:
    """One run of the agent in a session of its own, its reward, and what it came to: the
    session's trajectories.
    """
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{url}/sessions/{session}/v1", api_key="unused") as client:
        result = await Runner.run(an_agent(client), "Where is the key?", max_turns=10)
    async with httpx.AsyncClient(base_url=f"{url}/sessions/{session}") as http:
        await http.post("/reward", json={"reward": grade(str(result.final_output))})
        return dict((await http.get("/trajectories")).json())


async def main(url: str, runs: int) -> None:
    """`runs` runs at the same time."""
    for found in await asyncio.gather(*(play(url, f"finder-{at}") for at in range(runs))):
        for trajectory in found["trajectories"]:
            ids, mask = trajectory["input_ids"], trajectory["loss_mask"]
            turns = len(trajectory["turns"])
            print(
                f"{found['session_id']}: reward {found['reward']}, {turns} turns, {sum(mask)} of "
                f"{len(ids)} tokens are trained"
            )


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--url", default="http://127.0.0.1:8400", help="the endpoint's address")
    options.add_argument("--runs", type=int, default=4)
    given = options.parse_args()
    asyncio.run(main(given.url, given.runs))
