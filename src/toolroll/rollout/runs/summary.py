"""`Summary`: the result of a run, added up episode by episode.

Invariant: an ABORTED episode (its reward is None) is counted separately, and is not part of any
mean reward or pass rate.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.pass_at_k import passed
from toolroll.rollout.runtime.jsonable import finite
from toolroll.rollout.types import Status, Trajectory

_DIGITS = re.compile(r"\d+")


@dataclass(slots=True)
class Summary:
    """Sums over episodes, added one by one because a live display reads them during a run."""

    env: str = ""
    episodes: int = 0
    graded: int = 0
    reward: float = 0.0
    passed: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    stop_reasons: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    samples: defaultdict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """Graded rewards by task and sample."""
    aborted: Counter[str] = field(default_factory=Counter)
    """Aborted episodes by task."""
    turn_seconds: list[float] = field(default_factory=list)
    """The engine's latency of every turn, in seconds."""
    fork_reasons: Counter[str] = field(default_factory=Counter)
    """The number of sequences by the reason of their fork, without its details."""
    flat_tokens: int = 0
    """The tokens of all sequences of graded episodes."""
    trie_tokens: int = 0
    """The same if a prefix that sequences of an episode share counts once."""
    trainable: bool = True
    judged: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """Episodes with a judge and a rule, by whether they passed by the rule, and by the judge."""

    def add(self, episode: Episode) -> None:
        """Add one episode."""
        result = episode.result
        self.episodes += 1
        self.statuses[result.status.value] += 1
        self.stop_reasons[result.stop_reason] += 1
        for name, value in result.metrics.items():
            self.totals[name] += value  # type: ignore[assignment]
        # A fork repeats turns of an earlier sequence as "context". Do not count them twice.
        self.turn_seconds += [
            turn.latency
            for part in result.trajectories
            for turn in part.turns
            if turn.excluded != "context"
        ]
        self.fork_reasons.update(
            _DIGITS.sub("N", part.fork_reason.partition(":")[0])
            for part in result.trajectories
            if part.fork_reason is not None
        )
        self.trainable = self.trainable and result.info.get("trainable", True) is not False
        if result.reward is not None and result.status is not Status.ABORTED:
            self.graded += 1
            self.flat_tokens += sum(map(len, result.trajectories))
            self.trie_tokens += trie_tokens(result.trajectories)
            self.reward += result.reward
            self.passed += passed(result.reward)
            self.samples[episode.task_id][episode.sample] = result.reward
            if (grades := _judged(result.info)) is not None:
                self.judged[grades] += 1
        else:
            self.aborted[episode.task_id] += 1

    @property
    def rewards(self) -> dict[str, list[float]]:
        """Return graded rewards by task, in the order of the samples.

        Tasks are sorted by name, so that the order in which episodes are played has no effect.
        """
        return {
            task: [samples[sample] for sample in sorted(samples)]
            for task, samples in sorted(self.samples.items())
        }

    def mean(self, name: str) -> float:
        """Return the mean of a metric over all episodes, including aborted ones."""
        return self.totals[name] / self.episodes if self.episodes else 0.0

    def sizes(self, planned: Mapping[str, int]) -> dict[str, int]:
        """Return each task's number of samples: those that were played, or those in `planned` if
        they are more.
        """
        return {
            task: max(planned.get(task, 0), len(self.samples.get(task, ())) + self.aborted[task])
            for task in sorted({*planned, *self.samples, *self.aborted})
        }

    @property
    def mean_reward(self) -> float | None:
        """Return the mean reward of the graded episodes, or None if there are none."""
        return self.reward / self.graded if self.graded else None

    @property
    def pass_rate(self) -> float | None:
        """Return the share of graded episodes that passed, or None if there are none."""
        return self.passed / self.graded if self.graded else None

    @property
    def cached_share(self) -> float:
        """Return the share of all prompt tokens that came from the engine's prefix cache."""
        prompts = self.totals["prompt_tokens"]
        return self.totals["cached_tokens"] / prompts if prompts else 0.0

    def named(self, prefix: str) -> dict[str, float]:
        """Return the totals whose names have the form `prefix/NAME`, by NAME. Omit zeros."""
        return {
            name[len(prefix) + 1 :]: as_count(count)
            for name, count in self.totals.items()
            if name.startswith(f"{prefix}/") and as_count(count)
        }

    @property
    def mismatches(self) -> dict[str, float]:
        """Return the number of token mismatches by kind."""
        return self.named("token_mismatches")


def _judged(info: Mapping[str, Any]) -> tuple[bool, bool] | None:
    """Return whether an episode passed by the rule and by the judge, if it has both rewards."""
    judge = info.get("judge")
    if not isinstance(judge, Mapping):
        return None
    rule, score = finite(judge.get("rule")), finite(judge.get("score"))
    return None if rule is None or score is None else (passed(rule), passed(score))


def recomputed_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Return the number of tokens that the engine computed again, because its cache had dropped
    them since the turn before. The last token of a turn does not count: the engine computes it only
    with the next turn.
    """
    return sum(
        max(0, before.stop - 1 - turn.cached_tokens)
        for trajectory in trajectories
        for before, turn in pairwise(trajectory.turns)
        if turn.excluded != "context" and turn.prompt_tokens
    )


def trie_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Return the number of tokens if a prefix that several sequences share counts once."""
    total = 0
    for index, trajectory in enumerate(trajectories):
        shared = 0
        # The one before usually shares most. Another shares more only if its next token is equal.
        for earlier in reversed(trajectories[:index]):
            following = slice(shared, shared + 1)
            if np.array_equal(trajectory.input_ids[following], earlier.input_ids[following]):
                shared = max(shared, _shared(trajectory, earlier))
        total += len(trajectory) - shared
    return total


def _shared(first: Trajectory, second: Trajectory) -> int:
    length = min(len(first), len(second))
    same = first.input_ids[:length] == second.input_ids[:length]
    return length if same.all() else int(same.argmin())


def as_count(value: float) -> float:
    """Return a count as an int. Return it unchanged if it is too large to be one in JSON."""
    return int(value) if abs(value) < 2**53 else value
