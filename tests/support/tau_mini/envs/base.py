"""The environment: reset, step, and a reward by the database, as tau-bench computes it."""

import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from support.tau_mini.envs.user import load_user
from support.tau_mini.types import (
    Action,
    EnvInfo,
    EnvResetResponse,
    EnvResponse,
    RewardActionInfo,
    RewardOutputInfo,
    RewardResult,
    Task,
)

STOP = "###STOP###"


def to_hashable(item: Any) -> Any:
    if isinstance(item, dict):
        return tuple((key, to_hashable(item[key])) for key in sorted(item))
    if isinstance(item, list):
        return tuple(map(to_hashable, item))
    return tuple(sorted(map(to_hashable, item))) if isinstance(item, set) else item


def consistent_hash(value: Any) -> str:
    return sha256(str(value).encode()).hexdigest()


class Env:
    def __init__(
        self,
        load: Callable[[], dict[str, Any]],
        tools: Sequence[Any],
        tasks: Sequence[Task],
        wiki: str,
        user: tuple[str, str, str | None],
        task_index: int | None = None,
    ) -> None:
        self.data_load_func = load
        self.data = load()
        self.tools_map = {tool.get_info()["function"]["name"]: tool for tool in tools}
        self.tools_info = [tool.get_info() for tool in tools]
        self.terminate_tools: list[str] = []
        self.tasks = tasks
        self.task_index = random.randint(0, len(tasks)) if task_index is None else task_index
        self.task = tasks[self.task_index]
        self.wiki, self.rules = wiki, ["Be polite."]
        self.user = load_user(*user)
        self.actions: list[Action] = []

    def reset(self, task_index: int | None = None) -> EnvResetResponse:
        self.task_index = random.randint(0, len(self.tasks)) if task_index is None else task_index
        self.data, self.task, self.actions = self.data_load_func(), self.tasks[self.task_index], []
        said = self.user.reset(instruction=self.task.instruction)
        return EnvResetResponse(observation=said, info=EnvInfo(task=self.task, source="user"))

    def step(self, action: Action) -> EnvResponse:
        self.actions.append(action)
        info = EnvInfo(task=self.task, source=action.name)
        done = action.name in self.terminate_tools
        if action.name == "respond":
            said = self.user.step(action.kwargs["content"])
            info.source, done = "user", STOP in said
        elif action.name in self.tools_map:
            try:
                said = self.tools_map[action.name].invoke(data=self.data, **action.kwargs)
            except Exception as error:
                said = f"Error: {error}"
        else:
            said, done = f"Unknown action {action.name}", False
        if done:
            info.reward_info = self.calculate_reward()
            info.user_cost = self.user.get_total_cost()
        reward = info.reward_info.reward if info.reward_info else 0.0
        return EnvResponse(observation=said, reward=reward, done=done, info=info)

    def get_data_hash(self) -> str:
        return consistent_hash(to_hashable(self.data))

    def calculate_reward(self) -> RewardResult:
        mine, self.data = self.get_data_hash(), self.data_load_func()
        for action in self.task.actions:
            if action.name not in self.terminate_tools:
                self.step(action)
        wanted = self.get_data_hash()
        reward, info = (
            float(mine == wanted),
            RewardActionInfo(r_actions=mine == wanted, gt_data_hash=wanted),
        )
        actions = [action for action in self.task.actions if action.name != "respond"]
        if not self.task.outputs:
            return RewardResult(reward=reward, info=info, actions=actions)
        texts = [
            a.kwargs["content"].lower().replace(",", "")
            for a in self.actions
            if a.name == "respond"
        ]
        found = {
            output: any(output.lower() in text for text in texts) for output in self.task.outputs
        }
        said = RewardOutputInfo(r_outputs=float(all(found.values())), outputs=found)
        return RewardResult(reward=reward * all(found.values()), info=said, actions=actions)
