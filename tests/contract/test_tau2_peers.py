"""tau2's rewards against tau2-bench's own orchestrator and evaluator, on scripted episodes.

TOOLROLL_TAU2 names a checkout of tau2-bench, whose `.venv` (made by its `uv sync`) runs the
evaluator.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from toolroll.agents.users import CallTool
from toolroll.environments.tau2 import Tau2Factory
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import Action, EnvironmentOptions, StepResult, Task
from toolroll.rollout.types import Tool

CHECKOUT = os.environ.get("TOOLROLL_TAU2")
PLAYER = Path(__file__).parents[1] / "support" / "tau2_upstream.py"
PARTS = {"DB": "database", "COMMUNICATE": "communicated", "ENV_ASSERTION": "assertions"}

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(CHECKOUT is None, reason="TOOLROLL_TAU2 names no checkout of tau2-bench"),
]

Calls = list[tuple[str, Mapping[str, Any]]]
Script = list[tuple[str, Calls]]
"""For each turn of one side: its text and its calls."""


class Scripted:
    """A user with a script. When the script is over, the user stops."""

    def __init__(self, script: Script) -> None:
        self._turns = iter([*script, ("###STOP###", [])])
        self._call: CallTool | None = None

    def adopt_tools(self, tools: Sequence[Tool], call: CallTool) -> None:
        self._call = call

    async def reset(self, instruction: str) -> str:
        return await self.step("")

    async def step(self, content: str) -> str:
        line, calls = next(self._turns)
        for name, arguments in calls:
            assert self._call is not None
            self._call(name, arguments)
        return line

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        """There is nothing to close."""


def reference_scripts(factory: Tau2Factory, task: Task) -> tuple[Script, Script]:
    """The reference actions of `task`: the agent's turns, and the user's."""
    agent: Script = [
        (action.content, [(call.name, call.arguments or {}) for call in action.tool_calls])
        for action in factory.reference(task)
    ]
    user: Script = [("Hello, I need your help.", [])]
    before = "assistant"
    for action in task.data["evaluation_criteria"]["actions"]:
        side = action.get("requestor") or "assistant"
        if side == "user":
            if before != "user":
                user.append(("Done.", []))
            user[-1][1].append((action["name"], action["arguments"]))
        before = side
    return agent, user


def reversed_lists(arguments: Mapping[str, Any], other: str) -> Mapping[str, Any]:
    """`arguments` with their lists reversed; if there is none, the first text is `other`."""
    if any(isinstance(value, list) and len(value) > 1 for value in arguments.values()):
        return {
            key: value[::-1] if isinstance(value, list) else value
            for key, value in arguments.items()
        }
    texts = [key for key, value in arguments.items() if isinstance(value, str)]
    return {**arguments, texts[0]: other} if texts else dict(arguments)


def variants(
    agent: Script, user: Script, texts: Sequence[str], foreign: Calls
) -> Iterator[tuple[str, Script, Script]]:
    """Episodes of one task, most of which are wrong. `foreign`: calls of another task."""
    yield "reference", agent, user
    yield "nothing", [], user[:1]
    yield "over at once", agent, [("###STOP###", [])]
    places = [place for place, (_, calls) in enumerate(agent) if calls]
    for place in {*places[:1], *places[-1:]}:
        name, arguments = agent[place][1][0]
        rest = agent[place + 1 :]
        yield "dropped", [*agent[:place], *rest], user
        changed = reversed_lists(arguments, "#W0000000")
        yield "changed", [*agent[:place], ("", [(name, changed)]), *rest], user
        first = dict(list(arguments.items())[:1])
        yield "fewer arguments", [*agent[:place], ("", [(name, first)]), *rest], user
    yield "extra", [("", foreign), *agent], user
    yield "many errors", [("", [("no_such_tool", {})] * 10), *agent], user
    yield "nine errors", [("", [("no_such_tool", {})] * 9), *agent], user
    if len(user) > 1:
        yield "user does nothing", agent, [(line, []) for line, _ in user]
        yield "user fails", agent, [(line, calls * 2) for line, calls in user]
    if texts:
        calls = agent[:-1]
        spoken: tuple[str, Calls] = ("; ".join(texts), [("calculate", {"expression": "1 + 1"})])
        yield "silent", [*calls, ("Goodbye.", [])], user
        yield "one missing", [*calls, ("; ".join(["All else:", *texts[1:]]), [])], user
        yield "beside a call", [*calls, spoken, ("Goodbye.", [])], user
        half = len(texts[0]) // 2
        split: Script = [(f"It is {texts[0][:half]}", []), (f"{texts[0][half:]}, yes", [])]
        yield "in two messages", [*calls, *split], [*user, ("Hm?", [])]
        yield "with commas", [*calls, ("; ".join(",".join(text) for text in texts), [])], user


async def played(factory: Tau2Factory, task: Task, agent: Script, user: Script) -> StepResult:
    """The last step of an episode of ours."""
    env = factory.make(EnvironmentOptions(user=lambda seed: Scripted(user)))
    await env.reset(task, 0)
    result = StepResult()
    for text, calls in [*agent, *([("Goodbye.", [])] * (len(user) + 1))]:
        result = await env.step(
            Action(text, tuple(ToolCall(name, dict(arguments), "") for name, arguments in calls))
        )
        if result.done:
            break
    await env.close()
    return result


@pytest.mark.parametrize("domain", ["airline", "retail", "telecom"])
async def test_each_reward_is_the_one_of_tau2s_evaluator(domain: str, record_property: Any) -> None:
    """Every task of the split base, and all variants of its episode."""
    assert CHECKOUT is not None
    factory = Tau2Factory(domain, data=CHECKOUT, nl_assertions="skip")
    tasks = factory.tasks("base")
    foreign = [
        call for task in tasks for _, calls in reference_scripts(factory, task)[0] for call in calls
    ]
    episodes = []
    for task in tasks:
        agent, user = reference_scripts(factory, task)
        texts = task.data["evaluation_criteria"].get("communicate_info") or []
        other = [foreign[(task.index * 7 + 3) % len(foreign)]]
        for name, agent_script, user_script in variants(agent, user, texts, other):
            episodes.append((task, name, agent_script, user_script))
    theirs = _theirs(domain, episodes)
    differing, counts = [], Counter[tuple[str, float]]()
    for (task, name, agent, user), (reward, parts) in zip(episodes, theirs, strict=True):
        result = await played(factory, task, agent, user)
        graded = result.info["reward_info"]
        ours = {part: graded[key] for part, key in PARTS.items() if part in parts}
        ours |= {"ACTION": graded["actions"]} if "ACTION" in parts else {}
        counts[name, reward] += 1
        if (result.reward, ours) != (reward, parts):
            differing.append((task.id, name, graded, reward, parts))
    record_property(
        "rewards", {f"{name} {reward}": count for (name, reward), count in counts.items()}
    )
    assert differing == []
    assert counts["reference", 1.0] == len(tasks)
    assert {reward for _, reward in counts} == {0.0, 1.0}


def _theirs(domain: str, episodes: Sequence[tuple[Task, str, Script, Script]]) -> Any:
    assert CHECKOUT is not None
    checkout = Path(CHECKOUT)
    wanted = [{"task": task.id, "agent": agent, "user": user} for task, _, agent, user in episodes]
    done = subprocess.run(
        [checkout / ".venv" / "bin" / "python", "-P", PLAYER],
        input=json.dumps([domain, wanted]),
        env={
            **os.environ,
            "PYTHONPATH": str(checkout / "src"),
            "TAU2_DATA_DIR": str(checkout / "data"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
