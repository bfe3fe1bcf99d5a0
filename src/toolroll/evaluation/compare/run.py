"""`ComparedRun`: one environment's part of a run folder, as a comparison needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolroll.evaluation.recorded_run import recorded_runs
from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.run_directory import refuse_no_run, unfinished
from toolroll.rollout.types import Status

_MOST_VALUES = 4


@dataclass(frozen=True, slots=True)
class PlayedSample:
    """One sample of a task. `reward` is None if the episode was aborted."""

    reward: float | None
    number: int
    seed: int
    task_hash: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """The episodes of `env` in the run `folder`.

    `recorded` are the settings and the latest provenance in `run.json`, or empty if there is none.
    `tasks` has the samples of each task. `sampled` has the values of each sampling parameter with
    which turns were sampled, except `max_new_tokens`: `limits` has it with the length that the
    sequence would have with as many tokens. `environments` has the values of the environment's
    hash. `unfinished` says how many episodes there are, if the run is to have more.
    """

    folder: str
    env: str
    recorded: Mapping[str, Any] = field(default_factory=dict)
    tasks: dict[str, list[PlayedSample]] = field(default_factory=dict)
    sampled: dict[str, list[Any]] = field(default_factory=dict)
    limits: set[tuple[int, int]] = field(default_factory=set)
    environments: set[str] = field(default_factory=set)
    unfinished: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What is recorded, by name. What the turns were sampled with replaces what was set."""
        turns = {name: _shown(values) for name, values in self.sampled.items()}
        limits = sorted({limit for limit, _ in self.limits})  # empty if the setting is recorded
        if len(limits) > 1:  # those that reach its end are what the context left
            context = max(end for _, end in self.limits)
            limits = sorted({limit for limit, end in self.limits if end < context})
        if limits:
            turns["max_new_tokens"] = _shown(limits)
        return {**self.recorded, **turns}

    @property
    def aborted(self) -> int:
        """The number of aborted samples."""
        return sum(s.reward is None for samples in self.tasks.values() for s in samples)

    def add(self, episode: Episode) -> None:
        """Add one sample."""
        result = episode.result
        reward = None if result.status is Status.ABORTED else result.reward
        self.tasks.setdefault(episode.task_id, []).append(
            PlayedSample(
                reward, episode.sample, episode.seed, episode.task_hash, dict(result.metrics)
            )
        )
        self.environments.add(episode.environment)
        for trajectory in result.trajectories:
            for turn in trajectory.turns:
                limit = turn.sampling_params.get("max_new_tokens")
                if limit is not None and "max_new_tokens" not in self.recorded:
                    self.limits.add((limit, limit + turn.start))
                for name in turn.sampling_params.keys() - {"sampling_seed", "max_new_tokens"}:
                    values = self.sampled.setdefault(name, [])
                    if turn.sampling_params[name] not in values:
                        values.append(turn.sampling_params[name])


def _shown(values: Sequence[Any]) -> Any:
    if len(values) > _MOST_VALUES:
        return f"{len(values)} values"
    return values[0] if len(values) == 1 else sorted(values, key=repr)


def read_runs(
    folder: Path, *, on_bad_line: Callable[[str], None] | None = None
) -> dict[str, ComparedRun]:
    """Return the runs in `folder` by environment. `on_bad_line`: as for `read_episodes`. Raise
    `UsageError` if `folder` is not a run.
    """
    refuse_no_run(folder)
    recorded = recorded_runs(folder)
    runs: dict[str, ComparedRun] = {}
    for episode in read_episodes(folder, on_bad_line=on_bad_line):
        env = episode.env
        if env not in runs:
            facts = recorded[env].facts if env in recorded else {}
            runs[env] = ComparedRun(str(folder), env, facts)
        runs[env].add(episode)
    counts = {env: sum(map(len, run.tasks.values())) for env, run in runs.items()}
    left = unfinished(folder, counts)
    return {env: replace(run, unfinished=left.get(env)) for env, run in runs.items()}
