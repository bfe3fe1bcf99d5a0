"""Run an agent of the OpenAI Agents SDK through `toolroll serve`, and print how many tokens of
each run are trained.

    toolroll serve --model MODEL --engine http://127.0.0.1:30000
    python examples/openai_agents/looker.py --url http://127.0.0.1:8400

The agent's code does not use toolroll. Only its client's base URL refers to toolroll: it is the
address of a session. Each run of the agent has its own session. When a run has ended, this program
fetches the session's training sequences.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import aiohttp
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

ROOMS = {
    "kitchen": "A cold stove, and a note: 'the key is in the garden'.",
    "garden": "Roses, and a key under the third pot.",
}


# If the tool were strict, a grammar would constrain which tokens the engine can sample.
@function_tool(strict_mode=False)
def look(at: str) -> str:
    """Look at a room of the house."""
    return ROOMS.get(at, f"There is no {at} here.")


def an_agent(client: AsyncOpenAI, model: str = "default") -> Agent:
    """Return the agent. `client` has the base URL of the session."""
    return Agent(
        name="finder",
        instructions="You look for the key in a house. Look at rooms, then say where the key is.",
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        tools=[look],
    )


def grade(answer: str) -> float:
    """Return 1.0 if the agent found the key."""
    return float("third pot" in answer)


async def play(url: str, session: str) -> dict[str, Any]:
    """Run the agent in the session `session`, post the reward, and return the trajectories."""
    set_tracing_disabled(True)
    address = f"{url}/sessions/{session}"
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="unused") as client:
        result = await Runner.run(an_agent(client), "Where is the key?", max_turns=10)
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        reward = {"reward": grade(str(result.final_output))}
        await http.post(f"{address}/reward", json=reward)
        async with http.get(f"{address}/trajectories") as answer:
            return dict(await answer.json())


async def main(url: str, runs: int) -> None:
    """Play `runs` runs at the same time, and print the number of trained tokens of each."""
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
