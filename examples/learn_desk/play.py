"""Play episodes of the desk with toolroll's `Runner`. The replies are the teacher's or the
model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.learn_desk.batches import Sample, samples_of
from examples.learn_desk.teacher import replies
from examples.learn_desk.tokenizer import load_tokenizer

from toolroll import EnvironmentOptions, Episode, Model, RolloutArgs, Runner, RunSettings, Task
from toolroll.environments.desk import DESK, Desk, DeskFactory
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.runs.runner import session_id
from toolroll.testing import EmbeddedEngine
from toolroll.testing.policy import script

OPTIONS = EnvironmentOptions(settings={"policy": "brief"})
MAX_TURNS = 16
MAX_NEW_TOKENS = 160


async def play(
    url: str,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    concurrency: int = 64,
    chat_template: str | None = None,
    make_desk: Callable[[EnvironmentOptions], Desk] | None = None,
) -> list[Episode]:
    """Return `samples` episodes of each task, played against the engine at `url`."""
    args = RolloutArgs(
        engine=url,
        model=str(tokenizer.name_or_path),
        parser="hermes",
        concurrency=concurrency,
        chat_template=chat_template,
    )
    settings = RunSettings(
        sampling_params={"temperature": temperature, "max_new_tokens": MAX_NEW_TOKENS},
        samples=samples,
        max_turns=MAX_TURNS,
        concurrency=concurrency,
        seed=seed,
        sampling_seed=True,
    )
    episodes: list[Episode] = []
    async with Model.from_args(args, tokenizer=tokenizer) as model:
        make = agent_maker("tool-calling")
        factory = DESK if make_desk is None else _Made(make_desk)
        runner = Runner(factory, lambda: make(model, {}), settings, OPTIONS)
        await runner.run(tasks, episodes.append)
    return episodes


class _Made(DeskFactory):
    """The desk's factory, but `make` creates the environments."""

    def __init__(self, make: Callable[[EnvironmentOptions], Desk]) -> None:
        self._make = make

    def make(self, options: EnvironmentOptions) -> Desk:
        """Return a new environment."""
        return self._make(options)


async def play_references(folder: Path, tasks: Sequence[Task]) -> list[Sample]:
    """Play the teacher's replies with a scripted engine, and return the episodes' samples. Raise
    `AssertionError` if an episode does not earn 1.0.

    `folder`: the folder of the tokenizer.
    """
    lines = {session_id(DESK.name, task.id, 0): replies(task) for task in tasks}
    tokenizer = load_tokenizer(folder)
    async with EmbeddedEngine(tokenizer, script(lines), keep_log=False) as engine:
        episodes = await play(engine.url, tokenizer, tasks)
    wrong = [episode.task_id for episode in episodes if episode.result.reward != 1.0]
    if wrong:
        raise AssertionError(f"the references of {len(wrong)} tasks do not earn 1.0: {wrong[:5]}")
    return [sample for episode in episodes for sample in samples_of(episode.result)]
