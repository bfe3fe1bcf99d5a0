"""Play tasks of an environment with an agent of the OpenAI Agents SDK, through `toolroll serve`.

    toolroll serve --model MODEL --engine http://127.0.0.1:30000 --out out/agent
    python examples/openai_agents/tasks.py desk --tasks 10 --samples 2
    toolroll view out/agent

The environment's tools are the agent's tools, and the agent's final answers go to the environment's
user, until the environment gives a reward. Each episode is a session, whose name is the task's id:
`toolroll view` prints the table of all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
from contextlib import suppress
from typing import Any

import aiohttp
from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    OpenAIChatCompletionsModel,
    Runner,
    set_tracing_disabled,
)
from agents.tool_context import ToolContext
from openai import AsyncOpenAI

from toolroll import (
    Action,
    ActionError,
    Environment,
    EnvironmentFactory,
    EnvironmentOptions,
    Message,
    StepResult,
    Task,
    ToolCall,
    load_environment,
)

MOST_TURNS = 30


class Episode:
    """One episode of `env`. `last` is the result of its last step."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.last = StepResult()
        self._one_at_a_time = asyncio.Lock()

    async def step(self, content: str, *calls: ToolCall) -> list[Message]:
        """Take one action, and return the environment's messages."""
        async with self._one_at_a_time:
            if self.last.done:
                return [{"role": "user", "content": "The episode is over."}]
            try:
                step = await asyncio.to_thread(self.env.step, Action(content, calls))
                self.last = await step if inspect.isawaitable(step) else step
            except ActionError as error:  # the agent's mistake
                return [{"role": "user", "content": f"Error: {error}"}]
            return list(self.last.messages)

    def tool(self, tool: dict[str, Any]) -> FunctionTool:
        """Return a tool of the environment as one of the agent."""

        async def call(context: ToolContext[Any], arguments: str) -> str:
            try:
                values = json.loads(arguments)
            except ValueError as error:  # the agent's mistake
                return f"Error: the arguments are not JSON: {error}"
            made = ToolCall(tool["function"]["name"], values, arguments)
            answers = await self.step("", made.with_id(context.tool_call_id))
            return "\n".join(str(answer["content"]) for answer in answers)

        function = {"description": "", "parameters": {"type": "object"}, **tool["function"]}
        # If the tool were strict, a grammar would constrain which tokens the engine can sample.
        return FunctionTool(
            function["name"],
            function["description"],
            function["parameters"],
            call,
            strict_json_schema=False,
        )


async def play(url: str, factory: EnvironmentFactory, task: Task, seed: int) -> float | None:
    """Play one episode in a session, finish the session with the reward, and return it."""
    env = factory.make(EnvironmentOptions())
    found = env.reset(task, seed)
    start = await found if inspect.isawaitable(found) else found
    episode, address = Episode(env), f"{url}/sessions/{task.id}"
    system = [str(one["content"]) for one in start.messages if one["role"] == "system"]
    items: list[Any] = [one for one in start.messages if one["role"] != "system"]
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="unused") as client:
        agent = Agent(
            name="player",
            instructions="\n".join(system) or None,
            model=OpenAIChatCompletionsModel(model="default", openai_client=client),
            tools=[episode.tool(tool) for tool in start.tools],
        )
        with suppress(MaxTurnsExceeded):
            for _ in range(MOST_TURNS):
                if episode.last.done:
                    break
                result = await Runner.run(agent, items, max_turns=MOST_TURNS)
                answers = await episode.step(str(result.final_output))
                items = [*result.to_input_list(), *answers]
    last = episode.last if episode.last.done else StepResult(reward=0.0)  # at a limit
    if closing := env.close():
        await closing
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        graded = {"reward": last.reward, "info": dict(last.info)}
        await http.post(f"{address}/reward", json=graded)
        await http.delete(address)
    return last.reward


async def main(url: str, env: str, tasks: int, samples: int) -> None:
    """Play the first `tasks` tasks, all at the same time, and the samples of a task in turn."""
    set_tracing_disabled(True)
    factory = load_environment(env)
    async with aiohttp.ClientSession() as http:
        try:
            await http.get(f"{url}/health")
        except aiohttp.ClientConnectionError:
            sys.exit(f"{url}: nothing answers: start `toolroll serve` first")

    async def play_samples(task: Task) -> None:
        for seed in range(samples):
            print(f"{task.id}: reward {await play(url, factory, task, seed)}")

    chosen = factory.tasks(factory.splits[0])[:tasks]
    await asyncio.gather(*map(play_samples, chosen))


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("env", help="an environment without a simulated user, such as desk")
    options.add_argument("--url", default="http://127.0.0.1:8400", help="the endpoint's address")
    options.add_argument("--tasks", type=int, default=10)
    options.add_argument("--samples", type=int, default=1)
    given = options.parse_args()
    asyncio.run(main(given.url, given.env, given.tasks, given.samples))
