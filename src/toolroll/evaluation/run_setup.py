"""`Plan`: the environment, tasks and model of a run, opened from its settings.

The command's process has one plan. If the run is distributed over processes or a cluster, each
worker has its own plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from toolroll.agents.loop.adapt import as_environment
from toolroll.agents.loop.episode_agent import EpisodeAgent
from toolroll.evaluation.environment_identity import environment_identity, imported_packages
from toolroll.evaluation.files_read import FilesRead
from toolroll.evaluation.run_config import RunConfig
from toolroll.rollout.environment import Environment, EnvironmentFactory, EnvironmentOptions, Task
from toolroll.rollout.episode import Agent
from toolroll.rollout.errors import ToolrollError
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.tokenizers import generation_defaults
from toolroll.rollout.runs.environment_class import EnvironmentClass
from toolroll.rollout.runs.registry import (
    agent_maker,
    check_env_args,
    choose_tasks,
    load_environment,
    user_maker,
)
from toolroll.rollout.runs.run_directory import read_settings
from toolroll.rollout.runs.runner import Runner, check_ids
from toolroll.rollout.runtime.threads import Threads


@dataclass(frozen=True, slots=True)
class Plan:
    """The episodes to play, and how. `identity`: the settings that determine them. `read`: the
    files that the environment's code opens.
    """

    config: RunConfig
    factory: EnvironmentFactory
    tasks: Sequence[Task]
    make_agent: Callable[[], Agent]
    options: EnvironmentOptions
    identity: Mapping[str, Any]
    served: Model | None = None
    read: FilesRead | None = None


async def prepare(config: RunConfig, stack: AsyncExitStack) -> Plan:
    """Open the environment, the model and the user simulator of a run. `stack` closes them."""
    read = FilesRead(config.env)
    plan = await _opened(config, stack)
    _check_tasks(plan)
    return with_identity(plan, read)


def with_identity(plan: Plan, read: FilesRead) -> Plan:
    """Return `plan` with its identity, and with the files that the environment has `read`."""
    config, factory, served = plan.config, plan.factory, plan.served
    tasks = plan.tasks if config.tasks is None else choose_tasks(factory, config.split, None)
    recorded = {} if config.out is None else read_settings(config.out).get(factory.name, {})
    environment = {
        "env": factory.name,  # without the path of its file, whose folder may be moved
        "split": config.split or factory.splits[0],
        "environment": environment_identity(config.env, factory, tasks),
        "packages": imported_packages(config.env),
        "read": read.again(recorded.get("read", {})),
    }
    template = (
        {}
        if served is None
        else {"template": served.template.fingerprint, "parser": served.parser.name}
    )
    return replace(plan, identity=config.identity | environment | template, read=read)


async def _opened(config: RunConfig, stack: AsyncExitStack) -> Plan:
    """Return the plan without its identity."""
    factory = load_environment(config.env, config.env_args)
    tasks = choose_tasks(factory, config.split, config.tasks)
    check_ids(tasks)
    options = EnvironmentOptions()
    if config.user_model is not None:
        options = EnvironmentOptions(user=await _users(config, stack))
    if config.env_args:  # wrong ones are refused before a tokenizer is loaded
        check_env_args(factory, options)
    if config.baseline_url is not None:
        threads = Threads(config.concurrency)
        agent = agent_maker(config.agent)(threads, config.agent_settings)
        stack.push_async_callback(agent.aclose)
        return Plan(config, factory, tasks, lambda: agent, options, {})
    model = Model.from_args(config)
    config = config.with_defaults(generation_defaults(config.model))
    served = await stack.enter_async_context(model)
    return Plan(config, factory, tasks, served_agents(config, served), options, {}, served)


def _check_tasks(plan: Plan) -> None:
    """Raise `UsageError` if a task cannot be played, if the environment's class has a check."""
    factory = plan.factory
    if (
        not isinstance(factory, EnvironmentClass)
        or factory.kind.check_task is Environment.check_task
    ):
        return
    try:
        environment = as_environment(factory.make(plan.options))
    except Exception as error:  # of the environment's own code
        if isinstance(error, ToolrollError):
            raise
        return  # the episodes say so
    agent = plan.make_agent()
    playing = agent.prepare(environment) if isinstance(agent, EpisodeAgent) else environment
    for task in plan.tasks:
        playing.check_task(task)


def served_agents(config: RunConfig, served: Model) -> Callable[[], Agent]:
    """Return the function that makes agents for the served model."""
    make = agent_maker(config.agent)
    return lambda: make(served, config.agent_settings)


async def open_runner(
    config: RunConfig, share: int, stack: AsyncExitStack
) -> tuple[Runner, Sequence[Task]]:
    """Return the runner and the tasks of one worker, which plays `share` concurrent episodes."""
    cache_share = config.cache_share * share / config.concurrency
    config = config.model_copy(update={"concurrency": share, "cache_share": cache_share})
    plan = await _opened(config, stack)
    if config.out is not None and plan.served is not None:
        plan.served.engine.keep_sessions(config.out)
    return Runner(plan.factory, plan.make_agent, plan.config, plan.options), plan.tasks


async def _users(config: RunConfig, stack: AsyncExitStack) -> Any:
    """Return the function that makes user simulators.

    They call the OpenAI-compatible endpoint at `user_url`. By default, this is the baseline's
    endpoint. Without a baseline, it is the engine's.
    """
    shared = config.user_url is None or config.baseline_url is None  # one server gets the key
    users = user_maker("openai")(
        base_url=config.user_url or config.baseline_url or f"{config.engine}/v1",
        model=config.user_model,
        strategy=config.user_strategy,
        engine_timeout=config.engine_timeout,
        api_key_env=config.api_key_env if shared else None,
    )
    await stack.enter_async_context(users)
    return users.make
