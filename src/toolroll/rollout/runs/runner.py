"""`Runner`: plays (task, sample) pairs of one environment concurrently, in one event loop.

Invariants:

- A failing episode never affects another episode.
- A cancelled run leaves no request at the engine, and returns no unfinished episode.
- An episode's seed depends on the run's seed, the task and the sample, but not on the order in
  which episodes are played.
- An episode that fails for infrastructure reasons is retried with the same seed and session. Only
  its last attempt is returned.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from toolroll.rollout.engine import ROUTING_KEY
from toolroll.rollout.environment import EnvironmentFactory, EnvironmentOptions, Task
from toolroll.rollout.episode import Agent, Episode, InteractionResult
from toolroll.rollout.errors import (
    EngineUnreachableError,
    EnvironmentFailure,
    RolloutError,
    TimeLimitError,
    UsageError,
    describe,
    error_in,
    first_error,
    message_of,
)
from toolroll.rollout.runs.callbacks import Callback, Callbacks
from toolroll.rollout.runs.episode_file import Whole, check_readable
from toolroll.rollout.runs.summary import recomputed_tokens
from toolroll.rollout.runtime.blocked_loop import watched_loop
from toolroll.rollout.runtime.foreign import ForeignExitError, guarded
from toolroll.rollout.runtime.garbage import paced_garbage
from toolroll.rollout.runtime.jsonable import finite, json_bytes, plain, shown
from toolroll.rollout.runtime.threads import BlockingRunner, Threads
from toolroll.rollout.runtime.time_limit import pausable
from toolroll.rollout.runtime.unicode import replace_surrogates
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Status, StopReason

logger = logging.getLogger(__name__)

EpisodeKey = tuple[str, int]
"""The task id and the sample: the key of an episode within one environment."""

RERUN = frozenset(
    {
        StopReason.ENGINE_ABORT,
        StopReason.ENGINE_ERROR,
        StopReason.ENVIRONMENT_ERROR,
        StopReason.USER_ERROR,
        StopReason.TIME_LIMIT,
    }
)
"""The failures that a retry may fix. `token_error` and `internal_error` would recur."""

_REASON_OF_STATUS = {  # from the best status to the worst
    Status.COMPLETED: StopReason.DONE,
    Status.TRUNCATED: StopReason.MAX_TURNS,
    Status.ABORTED: StopReason.INTERNAL_ERROR,
}
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
"""The seconds before the first retry of an episode. Each further pause is twice as long."""
_REFERENCE_LIMIT = 60.0  # seconds


class RunStoppedError(RolloutError):
    """Raised if too many attempts in a row have failed, or if a server no longer answers.

    Finished episodes are kept. `failure`: the last error, as in `info["error"]` of an episode.
    """

    def __init__(self, message: str, failure: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.failure = dict(failure or {})


def episode_seed(seed: int, task_id: str, sample: int) -> int:
    """Return the seed of one episode, in [0, 2^31)."""
    digest = hashlib.blake2b(f"{seed}/{task_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31


def task_hash(env: str, task: Task) -> str:
    """Return a hash of the environment's name, the task's id and the task's data. It is the same in
    every process.
    """
    content = json_bytes([env, task.id, task.data], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


async def expected_calls(
    factory: EnvironmentFactory, task: Task, threads: BlockingRunner
) -> list[dict[str, Any]]:
    """Return the calls of the task's reference, or [] if there is none. If reading it raises an
    error or takes too long, log this and return [].
    """
    limit = asyncio.timeout(None)

    def begun() -> None:  # not while it waits for a thread
        limit.reschedule(asyncio.get_running_loop().time() + _REFERENCE_LIMIT)

    try:
        with guarded():
            async with limit:
                read = guarded()(factory.reference)
                actions: Any = await threads.run_in_thread(read, task, begun=begun)
                if inspect.isawaitable(actions):
                    actions = await actions
            calls = [call for action in actions or () for call in action.tool_calls]
            return [{"name": call.name, "arguments": plain(call.arguments)} for call in calls]
    except Exception as error:  # noqa: BLE001 - the episode itself is good
        logger.warning("the reference of task %s is not recorded: %r", task.id, error)
        return []


def session_id(env: str, task_id: str, sample: int) -> str:
    """Return the session id of one episode."""
    return f"{env}/{task_id}#{sample}"


def remaining(
    tasks: Sequence[Task], samples: int, done: Collection[EpisodeKey]
) -> list[EpisodeKey]:
    """Return the episodes to play, in order: the first sample of all tasks, then the second."""
    return [
        (task.id, sample)
        for sample in range(samples)
        for task in tasks
        if (task.id, sample) not in done
    ]


async def play_all(
    todo: Sequence[EpisodeKey],
    players: Iterable[Callable[[EpisodeKey], Awaitable[Episode]]],
    on_episode: Callable[[Episode], None],
    then: Callable[[Episode], Awaitable[None]] | None = None,
) -> None:
    """Play the episodes in `todo`. Each of `players` plays one episode at a time, and all of them
    play concurrently. For each finished episode, call `on_episode`, which stores it, and then
    `then`.

    If a player or `on_episode` raises an error, the other episodes are cancelled, and then the
    first `ToolrollError` is raised, or the first error. Raise `RolloutError` if an episode was not
    played, because no episode may be lost without an error. If code on the event loop exits,
    `asyncio.run` cancels this call and then ends with the code's own exit status, which may be 0:
    raise `SystemExit` with a message instead (status 1).
    """
    queue, missing = iter(todo), set(todo)

    async def work(play: Callable[[EpisodeKey], Awaitable[Episode]]) -> None:
        for key in queue:
            episode = await play(key)
            with guarded():
                on_episode(episode)
            missing.discard(key)
            if then is not None:
                await then(episode)

    try:
        async with asyncio.TaskGroup() as group:
            for play in players:
                group.create_task(work(play))
    except asyncio.CancelledError as error:
        if missing and isinstance(error.__context__, SystemExit):
            raise SystemExit(_not_played(missing, todo, "code on the event loop exited")) from error
        raise
    except ExceptionGroup as failed:
        raised = first_error(failed)
    else:
        if not missing:
            return
        raised = RolloutError(
            _not_played(missing, todo, "the asyncio tasks that played them were cancelled")
        )
    raise raised  # not above, where `raise` would replace its context


def _not_played(missing: Collection[EpisodeKey], todo: Sequence[EpisodeKey], why: str) -> str:
    task_id, sample = min(missing)
    return (
        f"the run ended although {len(missing)} of {len(todo)} episodes were not played, the first "
        f"one task {task_id}, sample {sample}: {why}. Finished episodes are kept; run again to "
        "play the others."
    )


class Runner:
    """Plays the tasks of `factory`. `make_agent()` returns the agent for one attempt at an episode.

    `callbacks` are called after each episode and at the end of the run (docs/callbacks.md).

        runner = Runner(load_environment("desk"), make_agent, RunSettings(samples=4))
        await runner.run(runner.factory.tasks("test"), episodes.append)
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        make_agent: Callable[[], Agent],
        settings: RunSettings,
        options: EnvironmentOptions | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.factory = factory
        self.settings = settings
        self._make_agent = make_agent
        self._options = options or EnvironmentOptions()
        self._callbacks = tuple(callbacks)
        self._failed_in_a_row = 0
        self._threads = Threads(8)
        self._expected: dict[str, asyncio.Task[list[dict[str, Any]]]] = {}

    async def run(
        self,
        tasks: Sequence[Task],
        on_episode: Callable[[Episode], None],
        *,
        done: Collection[EpisodeKey] = frozenset(),
    ) -> None:
        """Play every (task, sample) that is not in `done`.

        `on_episode` is called with each episode as soon as the episode is finished, and stores it.
        If it raises an exception, the run ends. The callbacks are called after `on_episode`.

        Raise `UsageError` as soon as one episode shows that the settings cannot work. Raise
        `RunStoppedError` as soon as `give_up_after` attempts in a row have failed, or a server has
        not answered for its `engine_timeout`. The other episodes are then cancelled, and their
        requests are aborted at the engine. This also happens if the caller is cancelled.
        """
        check_ids(tasks)
        by_id = {task.id: task for task in tasks}
        todo = remaining(tasks, self.settings.samples, done)
        callbacks = Callbacks(self._callbacks, self.factory.name)

        async def play(key: EpisodeKey) -> Episode:
            return await self.play(by_id[key[0]], key[1])

        players = [play] * min(self.settings.concurrency, len(todo))
        try:
            with paced_garbage(enabled=self.settings.pace_gc), watched_loop():
                await play_all(todo, players, on_episode, callbacks.on_episode)
        finally:
            await callbacks.on_summary()

    async def play(self, task: Task, sample: int) -> Episode:
        """Play one episode. Return its first attempt without an infrastructure failure. If every
        attempt fails in this way, return the last one.

        `metrics["reruns"]` counts the retries.
        """
        settings = self.settings
        pause = _FIRST_PAUSE
        for attempt in range(settings.reruns + 1):
            episode = await self._attempt(task, sample)
            self._watch(episode)
            episode.result.metrics["reruns"] = float(attempt)
            if episode.result.stop_reason not in RERUN or attempt == settings.reruns:
                return episode
            logger.info(
                "retry episode %s: %s",
                session_id(episode.env, task.id, sample),
                episode.result.stop_reason,
            )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise AssertionError("the loop returns")

    async def _attempt(self, task: Task, sample: int) -> Episode:
        name, settings = self.factory.name, self.settings
        seed = episode_seed(settings.seed, task.id, sample)
        reading = self._expected.get(task.id)
        if reading is None or reading.cancelled():  # once for all samples of the task
            reading = asyncio.create_task(expected_calls(self.factory, task, self._threads))
            self._expected[task.id] = reading
        limit = asyncio.timeout(settings.episode_timeout)
        try:
            async with limit:
                # A separate task, so that an episode that cancels its own task cancels nothing
                # else.
                with pausable(limit), guarded():
                    result = await asyncio.create_task(self._solve(task, sample, seed))
        except ForeignExitError:
            result = failed_result(
                StopReason.ENVIRONMENT_ERROR,
                EnvironmentFailure("the episode cancelled its own task"),
            )
        except TimeoutError:
            if not limit.expired():
                raise
            result = failed_result(
                StopReason.TIME_LIMIT,
                TimeLimitError(f"the episode took more than {settings.episode_timeout:g} s"),
            )
        hashed, calls = task_hash(name, task), await asyncio.shield(reading)
        return Episode(
            name, task.id, task.index, sample, seed, result, settings.model, hashed, calls
        )

    async def _solve(self, task: Task, sample: int, seed: int) -> InteractionResult:
        name, settings = self.factory.name, self.settings
        session = session_id(name, task.id, sample)
        first = sample - sample % settings.affinity
        ROUTING_KEY.set((session, session_id(name, task.id, first)))
        reason = StopReason.ENVIRONMENT_ERROR
        try:
            with guarded():
                env = self.factory.make(self._options)
                reason = StopReason.INTERNAL_ERROR
                result = await self._make_agent().asolve(
                    env,
                    None,
                    settings.params_of(seed),
                    task.index,
                    settings.max_turns,
                    task=task,
                    seed=seed,
                    session_id=session,
                )
                checked = checked_result(result)
                if checked.trajectories:
                    again = recomputed_tokens(checked.trajectories)
                    checked.metrics["recomputed_tokens"] = float(again)
                return checked
        except EngineUnreachableError as error:  # not a failure of this episode
            raise RunStoppedError(
                f"{error}. Finished episodes are kept; once that server is back, the same command "
                f"continues from there.",
                describe(error),
            ) from error
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - a failing episode must not end the run
            cause = (error.__cause__ if isinstance(error, ForeignExitError) else None) or error
            logger.warning(
                "episode %s ended with %s: %s: %s",
                session_id(name, task.id, sample),
                reason,
                type(cause).__name__,
                message_of(cause),
            )
            return failed_result(reason, cause)

    def _watch(self, episode: Episode) -> None:
        """Count aborted attempts in a row. Raise `RunStoppedError` if there are `give_up_after`."""
        if episode.result.status is not Status.ABORTED:
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        limit = self.settings.give_up_after
        if limit is not None and self._failed_in_a_row >= limit:
            error = error_in(episode.result.info)
            aborted = episode.result.stop_reason is StopReason.ENGINE_ABORT
            why = "a turn was aborted more often than max_resumes" if aborted else "no details"
            raise RunStoppedError(
                f"{self._failed_in_a_row} attempts at episodes failed in a row, the last one with "
                f"{episode.result.stop_reason}: "
                f"{error.get('message', why)}. Finished episodes are kept; the "
                f"same command continues from there.",
                error,
            )


def check_ids(tasks: Sequence[Task]) -> None:
    """Raise `UsageError` if two tasks have the same id, or if the episode file cannot store an id
    or an index.
    """
    ids, adapter = set(), TypeAdapter(Whole)
    for task in tasks:
        if not isinstance(task.id, str) or replace_surrogates(task.id) != task.id:
            raise UsageError(
                f"the id of a task is {shown(task.id)}: it must be text without lone surrogates"
            )
        if task.id in ids:
            raise UsageError(f"two tasks have the id {shown(task.id)}: give each task its own id")
        ids.add(task.id)
        try:
            adapter.validate_python(task.index)
        except ValidationError as error:
            problem = f"the index of the task {shown(task.id)} is {shown(task.index)}"
            raise UsageError(f"{problem}: it must be a whole number of 64 bits") from error


def checked_result(result: Any) -> InteractionResult:
    """Return an agent's result in a form that the episode file can store. Its reward is a float.

    If the status and the stop reason disagree, the worse one is kept. An aborted episode has no
    reward. Raise `TypeError` or `ValueError` if the result is not valid.
    """
    if not isinstance(result, InteractionResult):
        raise TypeError(f"asolve must return an InteractionResult, not {shown(result)}")
    reward, result.reward = result.reward, finite(result.reward)
    if reward is not None and result.reward is None:
        raise ValueError(
            f"asolve returned the reward {shown(reward)}: it must be a finite number, or None"
        )
    result.info, result.metrics = dict(result.info), dict(result.metrics)
    result.messages = [dict(message) for message in result.messages]
    result.status = Status(result.status)
    result.stop_reason = StopReason(result.stop_reason)  # type: ignore[call-arg]  # by its value
    severity = list(_REASON_OF_STATUS).index
    if severity(result.status) > severity(result.stop_reason.status):
        result.stop_reason = _REASON_OF_STATUS[result.status]
    result.status = result.stop_reason.status
    if result.status is Status.ABORTED:
        result.reward = None
    numbers = {name: finite(value) for name, value in result.metrics.items()}
    wrong = [
        f"{name}: {shown(result.metrics[name])}" for name, value in numbers.items() if value is None
    ]
    if wrong:
        message = f"metrics that are not finite numbers: {'; '.join(wrong)}"
        result.info.setdefault("metrics_error", {"type": "ValueError", "message": message})
        result.metrics = {name: value for name, value in numbers.items() if value is not None}
    check_readable(result)
    return result


def failed_result(reason: StopReason, error: BaseException) -> InteractionResult:
    """Return the result of a failed episode: no tokens, no reward."""
    info = {"error": describe(error)}
    return InteractionResult.of(
        (), messages=[], stop_reason=reason, prompt="", reward=None, info=info
    )
