"""A policy that replies with an environment's reference actions, and makes random mistakes at a
given rate. The demo's engine uses it. `play_episode` plays a whole episode, for tests of
environments.

The policy has no weights. It gets the solution of each task and writes it as a model would
(`<tool_call>` JSON), so that everything except the engine runs as in a real rollout. Mistakes make
the rewards differ: a wrong argument, a malformed call (corrected in the next turn), or an early
stop.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.rollout.environment import Action, EnvironmentFactory, EnvironmentOptions, Task
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.tokenizers import load_embedded_tokenizer
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.runs.runner import Runner, session_id
from toolroll.rollout.settings import RolloutArgs, RunSettings
from toolroll.testing.engine import EmbeddedEngine
from toolroll.testing.policy import Policy, script

_FAREWELL = "I am afraid that I cannot help you any further. Goodbye."


def write_action(action: Action) -> str:
    """Return the text of `action` in the Hermes format, as a model would write it."""
    calls = [
        "<tool_call>"
        + json.dumps({"name": call.name, "arguments": call.arguments})
        + "</tool_call>"
        for call in action.tool_calls
    ]
    return action.content + "".join(calls)


def play_references(
    factory: EnvironmentFactory,
    tasks: Sequence[Task],
    *,
    samples: int,
    mistakes: float = 0.0,
    seed: int = 0,
) -> dict[str, list[str]]:
    """Return the replies for each episode, by session id. Each task has `samples` episodes.

    The replies are the reference actions. With the probability `mistakes`, an episode contains one
    mistake. Raises `ValueError` if a task has no reference actions.
    """
    lines: dict[str, list[str]] = {}
    for task in tasks:
        actions = factory.reference(task)
        if actions is None:
            raise ValueError(f"{factory.name} gives no reference actions for {task.id}")
        texts = [write_action(action) for action in actions]
        for sample in range(samples):
            rng = random.Random(f"{seed}/{task.id}/{sample}")
            spoiled = _spoil(texts, actions, rng) if rng.random() < mistakes else texts
            lines[session_id(factory.name, task.id, sample)] = spoiled
    return lines


def reference_policy(lines: Mapping[str, Sequence[str]]) -> Policy:
    """Return a policy that replies with the `lines` of each session, and then with a farewell."""
    return script(lines, default=_FAREWELL)


def _spoil(texts: Sequence[str], actions: Sequence[Action], rng: random.Random) -> list[str]:
    calls = [turn for turn, action in enumerate(actions) if action.tool_calls]
    if not calls:
        return [_FAREWELL]
    turn = rng.choice(calls)
    kind = rng.choice(("argument", "malformed", "early_stop"))
    if kind == "early_stop":
        return [*texts[:turn], _FAREWELL]
    if kind == "malformed":
        return [
            *texts[:turn],
            texts[turn].replace("}</tool_call>", "</tool_call>", 1),
            *texts[turn:],
        ]
    call = actions[turn].tool_calls[0]
    wrong = Action(
        actions[turn].content, (type(call)(call.name, _wrong(call.arguments or {}, rng), call.raw),)
    )
    return [*texts[:turn], write_action(wrong), *texts[turn + 1 :]]


def _wrong(arguments: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return `arguments` with one value replaced with another of the same type. If there are no
    arguments, add one.
    """
    changed = dict(arguments)
    if not changed:
        return {"unexpected": True}
    name = rng.choice(sorted(changed))
    value = changed[name]
    if isinstance(value, bool):
        changed[name] = not value
    elif isinstance(value, int | float):
        changed[name] = value + 1
    elif isinstance(value, str):
        changed[name] = value[::-1] + "x"
    else:
        changed[name] = value[:-1] if isinstance(value, list) else {}
    return changed


async def play_episode(
    factory: EnvironmentFactory,
    task: Task,
    replies: Sequence[str] | None = None,
    *,
    options: EnvironmentOptions | None = None,
    max_turns: int = 30,
) -> InteractionResult:
    """Play `task` with all parts of a real run: HTTP, tokens, chat template, parser and
    environment.

    The model's turns are `replies`, followed by a farewell. In a reply, a call is written as
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If `replies` is None, the model's
    turns are the task's reference actions. Raise `ValueError` if the task has none.
    """
    lines = (
        {session_id(factory.name, task.id, 0): list(replies)}
        if replies is not None
        else play_references(factory, [task], samples=1)
    )
    async with EmbeddedEngine(
        load_embedded_tokenizer(), reference_policy(lines), context_length=131072
    ) as engine:
        args = RolloutArgs(
            engine=engine.url,
            model="embedded",
            parser="hermes",
            concurrency=4,
        )
        async with Model.from_args(args) as served:
            make = agent_maker("tool-calling")
            settings = RunSettings(sampling_params={"max_new_tokens": 4096}, max_turns=max_turns)
            runner = Runner(factory, lambda: make(served, {"verify": "always"}), settings, options)
            return (await runner.play(task, 0)).result
