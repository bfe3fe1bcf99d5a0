"""Play episodes of the cards with toolroll's `Runner`. The replies are the model's or scripted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from examples.learn_images.cards import CARDS
from support.vision import ExpandedEngine, image_tokens

from toolroll import (
    ChatTemplate,
    Engine,
    EngineConfig,
    EnvironmentOptions,
    Episode,
    Model,
    Runner,
    RunSettings,
    Task,
    get_parser,
)
from toolroll.rollout.runs.registry import agent_maker
from toolroll.testing import EmbeddedEngine
from toolroll.testing.policy import script


async def play(
    engine: Engine, tokenizer: Any, tasks: Sequence[Task], *, samples: int = 1, seed: int = 0
) -> list[Episode]:
    """Return `samples` episodes of each task."""
    template = ChatTemplate(tokenizer, images=image_tokens(tokenizer))
    settings = RunSettings(
        sampling_params={"temperature": 1.0, "max_new_tokens": 64}, samples=samples, max_turns=6,
        concurrency=64, seed=seed, sampling_seed=True,
    )  # fmt: skip
    episodes: list[Episode] = []
    async with Model(engine, template, get_parser("hermes", template.encoder.control)) as model:
        make = lambda: agent_maker("tool-calling")(model, {})
        await Runner(CARDS, make, settings, EnvironmentOptions()).run(tasks, episodes.append)
    return episodes


async def play_script(
    replies: Mapping[str, Sequence[str]], tokenizer: Any, tasks: Sequence[Task]
) -> list[Episode]:
    """Return an episode of each task, played by an engine without weights."""
    async with EmbeddedEngine(tokenizer, script(replies), keep_log=False) as embedded:
        config = EngineConfig(engine=embedded.url, vocab_size=len(tokenizer))
        return await play(ExpandedEngine(config), tokenizer, tasks)
