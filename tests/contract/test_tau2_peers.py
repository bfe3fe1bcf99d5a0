"""tau2's rewards against tau2-bench's own orchestrator and evaluator, on scripted episodes.

TOOLROLL_TAU2 names a checkout of tau2-bench, whose `.venv` (made by its `uv sync`) runs the
evaluator.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tau2_user import Calls, Script, Scripted, play, reference_user

from toolroll.environments.tau2 import Tau2Factory
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import Action, StepResult, Task

CHECKOUT = os.environ.get("TOOLROLL_TAU2")
PLAYER = Path(__file__).parents[1] / "support" / "tau2_upstream.py"
PARTS = {"DB": "database", "COMMUNICATE": "communicated", "ENV_ASSERTION": "assertions"}

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(CHECKOUT is None, reason="TOOLROLL_TAU2 names no checkout of tau2-bench"),
]


def reference_agent(factory: Tau2Factory, task: Task) -> Script:
    """The agent's turns with the reference actions of `task`."""
    return [
        (action.content, [(call.name, call.arguments or {}) for call in action.tool_calls])
        for action in factory.reference(task)
    ]


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
    actions = [
        Action(text, tuple(ToolCall(name, dict(arguments), "") for name, arguments in calls))
        for text, calls in [*agent, *([("Goodbye.", [])] * (len(user) + 1))]
    ]
    return await play(factory, task, actions, Scripted(user))


@pytest.mark.parametrize("domain", ["airline", "retail", "telecom"])
async def test_each_reward_is_the_one_of_tau2s_evaluator(domain: str, record_property: Any) -> None:
    """Every task of the split base, and all variants of its episode."""
    assert CHECKOUT is not None
    factory = Tau2Factory(domain, data=CHECKOUT, nl_assertions="skip")
    tasks = factory.tasks("base")
    agents = [reference_agent(factory, task) for task in tasks]
    foreign = [call for agent in agents for _, calls in agent for call in calls]
    episodes = []
    for task, agent in zip(tasks, agents, strict=True):
        user = reference_user(task.data)
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
