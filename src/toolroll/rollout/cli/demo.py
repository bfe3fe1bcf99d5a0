"""`toolroll demo`: play real benchmarks against the embedded engine with scripted replies."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from toolroll.rollout.cli.run_command import Outcome, play
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.config import RunConfig
from toolroll.rollout.runs.episode_file import FILE_NAME
from toolroll.rollout.runs.registry import choose_tasks, find_environment
from toolroll.rollout.runs.report import FILE_NAME as SUMMARY_NAME
from toolroll.rollout.runs.run_directory import SETTINGS_NAME, make_folder
from toolroll.rollout.runs.setup import Plan, rollout_args, served_agents
from toolroll.rollout.testing import EmbeddedEngine, load_embedded_tokenizer
from toolroll.rollout.testing.reference_policy import play_references, reference_policy
from toolroll.rollout.types import EnvironmentOptions

ENVIRONMENTS = ("bfcl/multi_turn_base", "desk")
MISTAKES = 0.3
"""The share of episodes with a mistake of the scripted engine. Mistakes make the rewards differ."""


async def run_demo(console: Console, out: Path, *, samples: int, seed: int) -> list[Outcome]:
    """Play every installed demo environment. Replace the episodes of an earlier demo in `out`."""
    console.print(
        f"The engine is scripted: it plays each task's reference actions, with a mistake in "
        f"{MISTAKES:.0%} of the episodes. "
        "Everything else is real.",
        highlight=False,
    )
    make_folder(out)
    for name in (FILE_NAME, SETTINGS_NAME, SUMMARY_NAME):
        (out / name).unlink(missing_ok=True)
    tokenizer = load_embedded_tokenizer()
    results = []
    for name in ENVIRONMENTS:
        factory = find_environment(name)
        command = factory.missing()
        if command is not None:
            console.print(f"{name} is skipped; to install it: {command}", highlight=False)
            continue
        tasks = choose_tasks(factory, None, None)
        lines = play_references(factory, tasks, samples=samples, mistakes=MISTAKES, seed=seed)
        async with EmbeddedEngine(
            tokenizer, reference_policy(lines), context_length=131072
        ) as engine:
            config = RunConfig(
                env=name,
                engine=engine.url,
                model="embedded",
                parser="hermes",
                samples=samples,
                max_steps=60,
                seed=seed,
                out=out,
            )
            async with Model.from_args(rollout_args(config), tokenizer=tokenizer) as served:
                plan = Plan(
                    config,
                    factory,
                    tasks,
                    served_agents(config, served),
                    EnvironmentOptions(),
                    config.identity,
                )
                results.append(await play(plan, console))
        if results[-1].stopped is not None:
            break
    return results
