"""Plays one environment from the command line: opens the model, runs, shows, stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from toolroll.rollout.args import RolloutArgs
from toolroll.rollout.cli.display import RunDisplay
from toolroll.rollout.cli.settings import RunConfig
from toolroll.rollout.engine import Engine
from toolroll.rollout.errors import UsageError
from toolroll.rollout.metrics import Summary
from toolroll.rollout.registry import agent_maker, choose_tasks, load_environment, user_maker
from toolroll.rollout.runner import Runner, RunSettings
from toolroll.rollout.served import ServedModel
from toolroll.rollout.store import EpisodeStore
from toolroll.rollout.types import EnvironmentOptions, Episode, Task


async def run(config: RunConfig, console: Console) -> tuple[Summary, float]:
    """`toolroll run`: the summary, and how many seconds it took."""
    factory = load_environment(config.env)
    tasks = choose_tasks(factory, config.split, config.tasks)
    served = ServedModel.from_args(rollout_args(config))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(served)
        await _check_engine(served)
        options = EnvironmentOptions()
        if config.user_model is not None:
            options = EnvironmentOptions(user=await _users(config, stack))
        return await play(config, served, tasks, options, console, out=config.out)


async def play(
    config: RunConfig,
    served: ServedModel,
    tasks: Sequence[Task],
    options: EnvironmentOptions,
    console: Console,
    *,
    out: Path | None,
) -> tuple[Summary, float]:
    """Play `tasks` against `served`, with the display, and into the episode file of `out`."""
    settings = RunSettings(
        sampling_params=config.sampling_params,
        samples=config.samples,
        max_num_steps=config.max_steps,
        concurrency=config.concurrency,
        seed=config.seed,
        model=config.model,
    )
    make = agent_maker(config.agent)
    agent_settings = {
        "on_invalid_call": config.on_invalid_call,
        "parallel_calls": config.parallel_calls,
        "on_length": config.on_length,
        "verify": config.verify,
    }
    runner = Runner(load_environment(config.env), lambda: make(served, agent_settings), settings, options)
    with RunDisplay(console, config.env, len(tasks) * config.samples) as display:
        if out is None:
            await runner.run(tasks, display.add)
        else:
            with EpisodeStore(out) as store:
                await runner.run(tasks, _both(display.add, store.append))
    return display.summary, display.seconds


def rollout_args(config: RunConfig) -> RolloutArgs:
    """The served model's part of the settings."""
    return RolloutArgs(
        engine_url=config.engine,
        hf_checkpoint=config.model,
        chat_template=config.chat_template,
        apply_chat_template_kwargs=config.chat_template_kwargs,
        tool_call_parser=config.parser,
        context_length=config.context_length,
        history=config.history,
        verify=config.verify,
        concurrency=config.concurrency,
    )


def _both(*takers: Callable[[Episode], None]) -> Callable[[Episode], None]:
    def take(episode: Episode) -> None:
        for taker in takers:
            taker(episode)

    return take


async def _check_engine(served: ServedModel) -> None:
    if isinstance(served.engine, Engine):
        health = await served.engine.health()
        if not health.ok:
            raise UsageError(health.why)


async def _users(config: RunConfig, stack: AsyncExitStack) -> Any:
    """The factory of user simulators, played by an OpenAI-compatible endpoint (default: the engine itself)."""
    users = user_maker("openai")(
        base_url=config.user_url or f"{config.engine}/v1",
        model=config.user_model,
        api_key_env=config.user_api_key_env,
    )
    await stack.enter_async_context(users)
    return users.make
