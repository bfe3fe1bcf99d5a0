"""`ToolrollGroup` and `ToolrollEnv`: tinker-cookbook's `EnvGroupBuilder` and `Env`.

Invariants: the episode's reward is the reward of its last step. An episode that must not be trained
raises an error, because tinker-cookbook trains all that it sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import RolloutError
from toolroll.rollout.types import StopReason
from toolroll.trainers.driven import DrivenPlayer, TurnByTurn
from toolroll.trainers.episodes import exclusion_reasons, why_aborted

STOP_REASONS = {
    StopReason.DONE: "completed",
    StopReason.LENGTH: "max_tokens",
    StopReason.CONTEXT_FULL: "context_overflow",
}
"""tinker-cookbook's names of stop reasons, where they differ."""


class ToolrollEnv:
    """tinker-cookbook's `Env`: one episode. `ToolrollGroup` makes it.

    tinker-cookbook keeps the logprobs, so those of `episode.result` are NaN.
    """

    def __init__(self, episode: TurnByTurn) -> None:
        self.episode = episode

    async def initial_observation(self) -> Any:
        """Return the first prompt and its stop tokens. If the episode ended before it, return an
        `InitialObservationOverflow`. Raise `RolloutError` if it was aborted.
        """
        prompt = await self.episode.start()
        if prompt is not None:
            return _observation(prompt), self.episode.stop_token_ids
        reward, metrics = _outcome(self.episode.result)
        types = import_module("tinker_cookbook.rl.types")
        return types.InitialObservationOverflow(reward=reward, metrics=metrics)

    async def step(self, action: list[int], *, extra: Mapping[str, Any] | None = None) -> Any:
        """Take the sampled ids and return a `StepResult`. Raise `RolloutError` if the episode was
        aborted, or excluded from training.
        """
        reason = None if extra is None else extra.get("stop_reason")
        prompt = await self.episode.step(action, finish_reason=reason)
        done = prompt is None
        reward, metrics = _outcome(self.episode.result) if done else (0.0, {})
        return import_module("tinker_cookbook.rl.types").StepResult(
            reward=reward,
            episode_done=done,
            next_observation=_observation(prompt or []),
            next_stop_condition=self.episode.stop_token_ids,
            metrics=metrics,
        )


@dataclass
class ToolrollGroup:
    """tinker-cookbook's `EnvGroupBuilder`: `group_size` episodes of the task `index`.

    All groups share `player`. `metadata` may contain an `env` and a `split` for the task. A group
    can be pickled if the player's tokenizer can.

    Example:
        player = DrivenPlayer(tokenizer, EpisodeSettings(env="desk", context_length=32768))
        batch = [ToolrollGroup(player, index, group_size=8) for index in range(16)]
    """

    player: DrivenPlayer
    index: int
    group_size: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    _envs: list[ToolrollEnv] = field(default_factory=list, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_envs": []}

    async def make_envs(self) -> Sequence[ToolrollEnv]:
        """Make the group's environments. A retry calls this again, and gets different seeds."""
        numbers = range(len(self._envs), len(self._envs) + self.group_size)
        envs = [
            ToolrollEnv(self.player.episode(self.index, metadata=self.metadata, number=number))
            for number in numbers
        ]
        self._envs += envs
        return envs

    async def compute_group_rewards(
        self, trajectory_group: list[Any], env_group: Sequence[Any]
    ) -> list[tuple[float, dict[str, float]]]:
        """Return no further reward."""
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:
        """End the episodes that are still running."""
        for env in self._envs:
            await env.episode.aclose()

    def logging_tags(self) -> list[str]:
        """Return the environment's name."""
        return [str(self.metadata.get("env") or self.player.settings.env)]


def _observation(ids: list[int]) -> Any:
    return import_module("tinker").ModelInput.from_ints(ids)


def _outcome(result: InteractionResult) -> tuple[float, dict[str, float]]:
    """Return the reward and the metrics of an episode. Raise `RolloutError` if it must not be
    trained.
    """
    if result.reward is None:
        raise RolloutError(f"the episode was aborted: {why_aborted(result)}")
    if reasons := exclusion_reasons(result):
        raise RolloutError(
            f"the episode has turns that must not be trained ({', '.join(reasons)}), and "
            "tinker-cookbook would train them"
        )
    metrics = {f"toolroll/{name}": value for name, value in result.metrics.items()}
    reason = STOP_REASONS.get(result.stop_reason, result.stop_reason)
    return result.reward, {f"stop/{reason}": 1.0, **metrics}
