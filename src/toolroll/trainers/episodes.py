"""`EpisodePlayer`: plays episodes of tasks on one model.

The adapters for slime, miles, TRL, verl, SkyRL and AReaL use it. Each of them finds the task in the
framework's sample, and converts the episode to the framework's format.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from pydantic import Field

from toolroll.evaluation.certify import certify
from toolroll.rollout.environment import Environment, EnvironmentFactory, EnvironmentOptions, Task
from toolroll.rollout.episode import Agent, InteractionResult
from toolroll.rollout.errors import EngineError, EngineUnreachableError, UsageError, error_in
from toolroll.rollout.model.model import Model, read_template
from toolroll.rollout.runs.registry import (
    agent_maker,
    check_env_args,
    check_split,
    load_environment,
    user_maker,
)
from toolroll.rollout.runs.runner import checked_result, episode_seed, failed_result
from toolroll.rollout.session.session import CONTEXT
from toolroll.rollout.settings import (
    AgentSettings,
    EnvironmentSettings,
    EpisodeLimits,
    ModelSettings,
    ProcessSettings,
    Reruns,
    RolloutArgs,
)
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Status, StopReason

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EpisodeSettings(
    ModelSettings, ProcessSettings, EnvironmentSettings, EpisodeLimits, AgentSettings
):
    """A trainer's settings for its episodes. The names are the same for every framework. `env` and
    `split` are used if the task's metadata does not name them.
    """

    reruns: Reruns = 1  # a batch waits for its slowest episode
    user: str | None = Field(
        default=None,
        description="Who plays the user: openai, tau-bench, or another entry point of "
        "toolroll.users.",
    )
    user_settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the user simulator; for openai: base_url, model ...",
    )

    @classmethod
    def checked(
        cls, settings: EpisodeSettings | Mapping[str, Any], *, name: Callable[[str], str] = str
    ) -> EpisodeSettings:
        """Return `settings`. Raise `UsageError` if they are wrong, or if they name an environment,
        a split, an agent or a user simulator that does not exist, or arguments that one of them
        refuses. Not tried: your own agent, and an environment with a user simulator. `name`: as of
        `EpisodePlayer`.
        """
        if not isinstance(settings, EpisodeSettings):
            settings = cls.read(settings, where=cls.__name__)
        if settings.env:
            factory = load_environment(settings.env, settings.env_args)
            check_split(factory, settings.split or factory.splits[0])
            if settings.env_args and settings.user is None:
                check_env_args(factory, EnvironmentOptions())
        read_template(settings.chat_template)
        maker = agent_maker(settings.agent)
        if maker.__module__.startswith("toolroll."):  # it reads its settings before its model
            maker(None, settings.agent_settings)
        if settings.user is not None:
            user_maker(settings.user)(**settings.user_settings)
        elif settings.user_settings:
            raise UsageError(
                f"{name('user_settings')} is set, but {name('user')} does not say which user "
                "simulator to use (such as openai)"
            )
        return settings

    def rollout_args(self, *, engine: str | None = None, model: str | None = None) -> RolloutArgs:
        """Return the settings of the model. The framework gives the address of the engine and the
        name of the tokenizer.
        """
        return RolloutArgs(**self.part(ModelSettings, ProcessSettings)).filled(
            engine=engine, model=model
        )


_OF_EPISODES = {"verify", "max_observation_bytes", "allow_model_mismatch"}
"""The settings of a model that the player and its agents read themselves."""


class EpisodePlayer:
    """Plays episodes with `settings` on `model`. `aclose` closes the model too. Raise `UsageError`
    if `settings` are wrong (`EpisodeSettings.checked`), or set what `model` was not made with.

    A failed episode is not played again if the engine is `stopped()`. `name` converts a setting's
    name to the framework's spelling for error messages. `images`: the trainer takes images.

    Example:
        player = EpisodePlayer(Model.from_args(args), EpisodeSettings(env="desk"))
        result = await player.play(0, sampling_params={"max_new_tokens": 512})
        await player.aclose()
    """

    def __init__(
        self,
        model: Model,
        settings: EpisodeSettings,
        *,
        name: Callable[[str], str] = str,
        images: bool = False,
    ) -> None:
        self.model = model
        model.takes_images &= images
        self.settings = EpisodeSettings.checked(settings, name=name)
        _refuse_ignored(self.settings, model, name)
        self._name = name
        self._make_agent = agent_maker(self.settings.agent)
        self._tasks: dict[tuple[str, str], tuple[EnvironmentFactory, Sequence[Task]]] = {}
        self._stack = AsyncExitStack()
        self._options: EnvironmentOptions | None = None
        self._opening = asyncio.Lock()
        self._numbers: Counter[tuple[int, Any, Any]] = Counter()

    @property
    def filler(self) -> int:
        """The token id that stands for an episode that ended before its first prompt."""
        return next(iter(self.model.template.stop_token_ids), 0)

    def next_number(self, index: int, metadata: Mapping[str, Any]) -> int:
        """Return how often this method was called for the task. This is the sample's number, for
        frameworks that do not number the samples of a task.
        """
        task = index, metadata.get("env"), metadata.get("split")
        self._numbers[task] += 1
        return self._numbers[task] - 1

    async def play(
        self,
        index: int,
        sampling_params: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        number: int = 0,
        session_id: str | None = None,
        begin: Callable[[Environment], None] = lambda env: None,
    ) -> InteractionResult:
        """Play the task `index`, and return the episode.

        `metadata` may contain an `env` and a `split` for this task. `number` is the sample's number
        among the task's samples, and gives each sample a different seed. An aborted episode is
        played again up to `settings.reruns` times, unless its stop reason is ENGINE_ABORT. `begin`
        gets the new environment of each attempt. If the engine does not answer before its model was
        checked, the result is an ENGINE_ERROR without an attempt. A warning says why an episode is
        not trained. Raise `UsageError` if the settings, `metadata` or `index` are not valid.
        """
        try:
            options = await self._open()
        except EngineUnreachableError:
            raise
        except EngineError as error:  # the next episode checks its model
            logger.warning("no episode is played: %s", error)
            return failed_result(StopReason.ENGINE_ERROR, error)
        factory, task = await self._find(index, metadata or {})
        session = session_id or uuid.uuid4().hex
        reruns = self.settings.reruns
        while True:
            agent: Agent = self._make_agent(self.model, self.settings.agent_settings)
            env = factory.make(options)
            begin(env)
            solved = await agent.asolve(
                env,
                None,
                sampling_params,
                task.index,
                self.settings.max_turns,
                task=task,
                seed=episode_seed(self.settings.seed, task.id, number),
                session_id=session,
            )
            result = checked_result(solved)
            failed = (  # a trainer's own engine may raise any error, which may not recur
                result.status is Status.ABORTED
                and result.stop_reason is not StopReason.ENGINE_ABORT
            )
            if not failed or reruns == 0 or self.model.engine.stopped():
                _warn_if_not_trained(result, session, task)
                return result
            reruns -= 1

    async def aclose(self) -> None:
        """Close the user simulators and the model."""
        await self._stack.aclose()
        await self.model.aclose()

    async def _open(self) -> EnvironmentOptions:
        """Wait for the engine if an `engine_timeout` is set. Check its model and the chat template,
        and open the user simulators, until a call succeeds. Return the options of all episodes.
        """
        async with self._opening:
            if self._options is not None:
                return self._options
            if self.model.args is not None and self.model.args.engine_timeout:
                await self.model.engine.wait_until_healthy()
            for line in await self.model.check_identity(
                allow_mismatch=self.settings.allow_model_mismatch
            ):
                logger.warning("%s", line)
            await self.model.run_in_thread(check_template, self.model.template)
            make = None
            if self.settings.user is not None:
                users = user_maker(self.settings.user)(**self.settings.user_settings)
                await self._stack.enter_async_context(users)
                make = users.make
            self._options = EnvironmentOptions(user=make)
            return self._options

    async def _find(
        self, index: int, metadata: Mapping[str, Any]
    ) -> tuple[EnvironmentFactory, Task]:
        """Return the environment's factory and the task `index`."""
        name = metadata.get("env") or self.settings.env
        if not name:
            raise UsageError(
                f"no environment is named: set {self._name('env')}, or write the tasks with "
                "`toolroll tasks ENV`, which sets metadata.env"
            )
        split = metadata.get("split") or self.settings.split or ""
        async with self._opening:
            if (name, split) not in self._tasks:
                factory = load_environment(name, self.settings.env_args)
                # May import a benchmark's package and read its database.
                self._tasks[name, split] = (
                    factory,
                    await self.model.run_in_thread(factory.tasks, split or factory.splits[0]),
                )
        factory, tasks = self._tasks[name, split]
        if not isinstance(index, int) or not 0 <= index < len(tasks):
            raise UsageError(
                f"{name} ({split or factory.splits[0]}) has tasks 0 to {len(tasks) - 1}; the "
                f"sample's task index is {index!r}"
            )
        return factory, tasks[index]


def _refuse_ignored(settings: EpisodeSettings, model: Model, name: Callable[[str], str]) -> None:
    """Raise `UsageError` if `settings` set something about the model that `model` does not have."""
    given = (ModelSettings.model_fields.keys() - _OF_EPISODES) & settings.model_fields_set
    for field in sorted(given):
        if model.args is None or getattr(model.args, field) != getattr(settings, field):
            raise UsageError(
                f"{name(field)} has no effect on a model that exists: give it to ChatTemplate or "
                "Model, or use Model.from_args(settings.rollout_args(...))"
            )


def exclusion_reasons(result: InteractionResult) -> list[str]:
    """Return the reasons for which sampled turns of an episode are not trained."""
    turns = (turn for trajectory in result.trajectories for turn in trajectory.turns)
    return sorted({turn.excluded for turn in turns if turn.excluded} - {CONTEXT})


def _warn_if_not_trained(result: InteractionResult, session_id: str, task: Task) -> None:
    """Log why no turn of a finished episode is trained. Why one was aborted is logged elsewhere."""
    trained = any(trajectory.trained_tokens for trajectory in result.trajectories)
    reasons = exclusion_reasons(result)
    if result.status is not Status.ABORTED and reasons and not trained:
        words = ", ".join(reasons)
        logger.warning("episode %s of task %s is not trained: %s", session_id, task.id, words)


def why_aborted(result: InteractionResult) -> str:
    """Return why an episode was aborted: the message of its error, or its stop reason if the engine
    aborted it without an error.
    """
    return str(error_in(result.info).get("message") or result.stop_reason)


class PerLoop(Generic[T]):
    """Values of each event loop, because a connection works only in its own loop."""

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, T]] = (
            WeakKeyDictionary()
        )

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """Return the running loop's value for `key`. The first call makes it."""
        values = self._values.setdefault(asyncio.get_running_loop(), {})
        if key not in values:
            values[key] = make()
        return values[key]

    def pop(self) -> list[T]:
        """Remove and return the values of the running loop."""
        return list(self._values.pop(asyncio.get_running_loop(), {}).values())


async def gather(episodes: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run `episodes` concurrently and return their results in order.

    If one episode raises an error, or if this call is cancelled, the other episodes are cancelled.
    The first error is raised after all episodes have ended, so that their environments are closed.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(episode) for episode in episodes]
    except BaseExceptionGroup as failed:
        error = failed.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise error  # not above, where `raise` would replace the error's cause or context


def task_index(prompt: Any) -> int:
    """Return the task's index from `prompt`, which is a number or a text of digits."""
    if isinstance(prompt, int) and not isinstance(prompt, bool):
        return prompt
    if isinstance(prompt, str) and prompt.strip().isdigit():
        return int(prompt)
    raise UsageError(
        f"a sample's prompt must be the task's index, not {str(prompt)[:60]!r}: write the tasks "
        f"with `toolroll tasks ENV`, and run with --input-key index and without "
        "--apply-chat-template"
    )


def check_template(template: ChatTemplate) -> None:
    """Log a warning if tool episodes fork with this chat template, or for each kind of conversation
    that it forks or refuses if tool calling is not exact. Raise `UsageError` if the template would
    produce wrong tokens.
    """
    report = certify(template)
    wrong = [probe.detail for probe in report.probes if probe.outcome == "wrong"]
    if wrong:
        raise UsageError(
            f"this chat template cannot be used for training, because its tokens would be wrong "
            f"({'; '.join(wrong)}): please report it"
        )
    if forks := report.forks(template.history):
        logger.warning("chat template: %s", forks)
    if not report.exact_with(template.history):
        for line in report.remarks():
            logger.warning("chat template: %s", line)
