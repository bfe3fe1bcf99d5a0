"""`play_episode`: plays a whole episode of an environment on the embedded engine, for tests of
environments.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolroll.rollout.model.model import Model
from toolroll.rollout.model.tokenizers import load_embedded_tokenizer
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.runs.runner import Runner, session_id
from toolroll.rollout.settings import RolloutArgs, RunSettings
from toolroll.rollout.testing.engine import EmbeddedEngine
from toolroll.rollout.testing.reference_policy import play_references, reference_policy
from toolroll.rollout.types import EnvironmentFactory, EnvironmentOptions, InteractionResult, Task


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
