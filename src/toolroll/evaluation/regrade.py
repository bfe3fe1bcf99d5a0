"""`Regrader`: replays the actions of recorded episodes in new environments, without an engine.

Invariants: an episode keeps its tokens and messages. Only its reward, the rewards of its turns and
its `info` are new, and its stop reason if the replay ended differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolroll.agents.loop.environment_results import OWN_INFO
from toolroll.evaluation.differences import excerpts, first_difference
from toolroll.rollout.environment import EnvironmentFactory, EnvironmentOptions, Task
from toolroll.rollout.episode import Episode, InteractionResult
from toolroll.rollout.errors import EngineUnreachableError, TimeLimitError, UsageError, error_in
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.runs.runner import (
    checked_result,
    expected_calls,
    failed_result,
    session_id,
    task_hash,
)
from toolroll.rollout.runtime.foreign import guarded
from toolroll.rollout.runtime.jsonable import plain
from toolroll.rollout.runtime.threads import BlockingRunner, Threads
from toolroll.rollout.runtime.time_limit import pausable
from toolroll.rollout.types import Status, StopReason

KEY = "regrade"
"""The key of an episode's `info` that has its recorded reward, and how the replay differed."""


@dataclass(slots=True)
class Regrader:
    """Regrades episodes of `factory`. `threads` runs blocking environments.

    `settings`: those of the recorded run. Without a `user_model`, the environment has its own user.
    """

    factory: EnvironmentFactory
    threads: BlockingRunner
    settings: Mapping[str, Any]
    _make_agent: Any = field(default_factory=lambda: agent_maker("replay"), init=False)
    _expected: dict[str, list[dict[str, Any]]] = field(default_factory=dict, init=False)
    _references: Threads = field(default_factory=lambda: Threads(1), init=False)

    async def regrade(self, episode: Episode, task: Task) -> Episode:
        """Return `episode`, which played `task`, with the reward of its replay."""
        recorded, replayed = episode.result, await self._replay_or_fail(episode, task)
        reason = _stop_reason(recorded, replayed)
        ours = {name: value for name, value in recorded.info.items() if name in OWN_INFO}
        notes = {"reward": recorded.reward, "difference": _difference(recorded, replayed)}
        result = replace(
            recorded,
            reward=replayed.reward,
            status=reason.status,
            stop_reason=reason,
            step_rewards=replayed.step_rewards,
            trajectories=replayed.trajectories,
            info=ours | replayed.info | {KEY: notes},
        )
        if task.id not in self._expected:
            self._expected[task.id] = await expected_calls(self.factory, task, self._references)
        calls = self._expected[task.id]
        hashed = task_hash(episode.env, task)
        return replace(episode, result=result, task_hash=hashed, expected_calls=calls)

    async def _replay_or_fail(self, episode: Episode, task: Task) -> InteractionResult:
        """Return the replay. If it takes longer than an episode of the run may, or raises an error
        that concerns this episode alone, return an aborted one, whose turns have no rewards.
        """
        reason, seconds = StopReason.ENVIRONMENT_ERROR, self.settings.get("episode_timeout")
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                with pausable(limit), guarded():
                    return await self._replay(episode, task)
        except (EngineUnreachableError, UsageError):  # every other episode would fail too
            raise
        except Exception as error:  # noqa: BLE001 - one replay must not end the command
            failure = error
            if limit.expired():
                failure = TimeLimitError(f"the replay took more than {seconds:g} s")
                reason = StopReason.TIME_LIMIT
        parts = tuple(
            replace(part, turns=tuple(replace(turn, reward=0.0) for turn in part.turns))
            for part in episode.result.trajectories
        )
        return replace(failed_result(reason, failure), trajectories=parts)

    async def _replay(self, episode: Episode, task: Task) -> InteractionResult:
        agent = self._make_agent(self.threads, {**self.settings, "recorded": episode.result})
        simulated = self.settings.get("user_model") is not None
        options = EnvironmentOptions(user=(lambda seed: agent.recording) if simulated else None)
        replayed = await agent.asolve(
            self.factory.make(options),
            None,
            {},
            task.index,
            len(agent.recording.replies),
            task=task,
            seed=episode.seed,
            session_id=session_id(episode.env, task.id, episode.sample),
        )
        return checked_result(replayed)


def _stop_reason(recorded: InteractionResult, replayed: InteractionResult) -> StopReason:
    """Return the stop reason of a regraded episode. A replay has no context length: it ends after
    as many turns as were recorded.
    """
    reasons = recorded.stop_reason, replayed.stop_reason
    is_full = reasons == (StopReason.CONTEXT_FULL, StopReason.MAX_TURNS)
    return StopReason.CONTEXT_FULL if is_full else replayed.stop_reason


def _difference(recorded: InteractionResult, replayed: InteractionResult) -> str:
    """Return how the replay differs from the recorded episode, or ""."""
    if replayed.status is Status.ABORTED:
        return f"the replay failed: {error_in(replayed.info).get('message')}"
    reasons = recorded.stop_reason, _stop_reason(recorded, replayed)
    before, after = (
        plain({"messages": result.messages, "tools": result.tools, "stop_reason": reason})
        for result, reason in zip((recorded, replayed), reasons, strict=True)
    )
    if before == after:
        return ""
    path, *values = first_difference(before, after)
    return "{} is {} recorded and {} replayed".format(path, *excerpts(*values))
