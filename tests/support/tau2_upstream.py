"""Play scripted episodes with tau2-bench's own orchestrator and evaluator. The checkout's Python
runs this file, which imports nothing of ours.

stdin: JSON `[domain, [episode, ...]]`. An episode is `{"task": id, "agent": [[text, calls], ...],
"user": [[line, calls], ...]}`, with calls as `[[name, arguments], ...]`. The user's calls come
before the line. When its script is over, the agent says goodbye, and the user stops. stdout: one
JSON list of `[reward, parts]`. NL_ASSERTION is left out, because it needs a judge model.
"""

import gc
import json
import multiprocessing
import os
import sys
from copy import deepcopy

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download

from loguru import logger
from tau2.agent.base_agent import HalfDuplexAgent
from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
from tau2.data_model.tasks import RewardType
from tau2.environment.db import DB
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator
from tau2.registry import registry
from tau2.user.user_simulator_base import HalfDuplexUser

logger.remove()
LOADED, SPARE = {}, {}
"""Databases by path. Each episode is played in a fork, which takes the loaded ones from SPARE."""
read = DB.load.__func__


def load(kind, path):
    if SPARE.get(path):
        return SPARE[path].pop()
    LOADED.setdefault(path, []).append(read(kind, path))
    return LOADED[path][-1]


DB.load = classmethod(load)


def tool_calls(side, calls):
    return [
        ToolCall(id=f"{side}{index}", name=name, arguments=arguments, requestor=side)
        for index, (name, arguments) in enumerate(calls)
    ] or None


class Agent(HalfDuplexAgent):
    def __init__(self, script):
        self.script = iter([*script, *([["Goodbye.", []]] * 300)])

    def get_init_state(self, message_history=None):
        return {}

    def generate_next_message(self, message, state):
        text, calls = next(self.script)
        calls = tool_calls("assistant", calls)
        return AssistantMessage(role="assistant", content=text or None, tool_calls=calls), state


class User(HalfDuplexUser):
    def __init__(self, script):
        messages = []
        for line, calls in [*script, ["###STOP###", []]]:
            if calls:
                messages.append((None, calls))
            messages.append((line, []))
        self.script = iter(messages)

    def get_init_state(self, message_history=None):
        return {}

    def generate_next_message(self, message, state):
        line, calls = next(self.script)
        calls = tool_calls("user", calls)
        return UserMessage(role="user", content=line, tool_calls=calls), state


def play(episode):
    task = deepcopy(TASKS[episode["task"]])
    criteria = task.evaluation_criteria
    criteria.reward_basis = [
        part for part in criteria.reward_basis if part is not RewardType.NL_ASSERTION
    ]
    environment = registry.get_env_constructor(DOMAIN)()
    agent, user = Agent(episode["agent"]), User(episode["user"])
    run = Orchestrator(DOMAIN, agent, user, environment, task, max_steps=10_000).run()
    result = evaluate_simulation(run, task, EvaluationType.ALL, False, DOMAIN)
    parts = {part.value: value == 1.0 for part, value in (result.reward_breakdown or {}).items()}
    return result.reward, parts


def play_in_fork(episode):
    forks = multiprocessing.get_context("fork")
    receiver, sender = forks.Pipe(duplex=False)
    process = forks.Process(target=lambda: sender.send(play(episode)))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


if __name__ == "__main__":
    DOMAIN, episodes = json.load(sys.stdin)
    TASKS = {task.id: task for task in registry.get_tasks_loader(DOMAIN)(None)}
    for _ in range(4):  # an episode makes four environments
        registry.get_env_constructor(DOMAIN)()
    SPARE.update(LOADED)
    gc.freeze()  # the forks share the databases' memory
    json.dump([play_in_fork(episode) for episode in episodes], sys.stdout)
