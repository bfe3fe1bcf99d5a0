"""What a run came to, in numbers.

Invariants: an ABORTED episode (reward None) counts in no reward and in no pass rate, and is shown apart (I9); pass^k and pass@k are
estimated without bias from n samples of each task.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import comb

from toolroll.rollout.types import Episode, Status

PASSED = 1.0 - 1e-6
"""A reward at or above this is a pass (tau-bench's rule)."""


@dataclass(slots=True)
class Summary:
    """Sums over episodes, taken in one by one: a live display reads it while a run goes on."""

    env: str = ""
    episodes: int = 0
    graded: int = 0
    reward: float = 0.0
    passed: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    stop_reasons: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    rewards: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, episode: Episode) -> None:
        """Take one episode in."""
        result = episode.result
        self.episodes += 1
        self.statuses[result.status.value] += 1
        self.stop_reasons[result.stop_reason] += 1
        for name, value in result.metrics.items():
            self.totals[name] += value  # type: ignore[assignment]
        if result.reward is not None and result.status is not Status.ABORTED:
            self.graded += 1
            self.reward += result.reward
            self.passed += result.reward >= PASSED
            self.rewards[episode.task_id].append(result.reward)

    def mean(self, name: str) -> float:
        """A metric per episode."""
        return self.totals[name] / self.episodes if self.episodes else 0.0

    @property
    def mean_reward(self) -> float | None:
        """Over the graded episodes, None where there are none."""
        return self.reward / self.graded if self.graded else None

    @property
    def pass_rate(self) -> float | None:
        """The share of graded episodes that passed."""
        return self.passed / self.graded if self.graded else None

    @property
    def cached_share(self) -> float:
        """Which share of all prompt tokens came from the engine's prefix cache."""
        prompts = self.totals["prompt_tokens"]
        return self.totals["cached_tokens"] / prompts if prompts else 0.0

    @property
    def mismatches(self) -> dict[str, int]:
        """Verification mismatches by kind."""
        return {
            name.partition("/")[2]: int(count) for name, count in self.totals.items() if name.startswith("token_mismatches/") and count
        }


def summarize(episodes: Iterable[Episode]) -> dict[str, Summary]:
    """A summary for each environment."""
    summaries: dict[str, Summary] = {}
    for episode in episodes:
        summaries.setdefault(episode.env, Summary(episode.env)).add(episode)
    return summaries


def pass_hat_k(rewards: Sequence[Sequence[float]], k: int) -> float:
    """pass^k: the chance that k samples of a task all pass, averaged over tasks: mean of C(c, k) / C(n, k).

    `rewards[task]` are the task's graded rewards; tasks with fewer than k of them raise `ValueError`.
    """
    return _mean_over_tasks(rewards, k, lambda n, c: comb(c, k) / comb(n, k))


def pass_at_k(rewards: Sequence[Sequence[float]], k: int) -> float:
    """pass@k: the chance that at least one of k samples passes, averaged over tasks: mean of 1 - C(n - c, k) / C(n, k)."""
    return _mean_over_tasks(rewards, k, lambda n, c: 1.0 - comb(n - c, k) / comb(n, k))


def _mean_over_tasks(rewards: Sequence[Sequence[float]], k: int, estimate: Callable[[int, int], float]) -> float:
    if not rewards:
        raise ValueError("there is no graded task")
    values = []
    for task in rewards:
        if len(task) < k or k < 1:
            raise ValueError(f"k = {k} needs at least {k} graded samples of every task, one has {len(task)}")
        passed = sum(reward >= PASSED for reward in task)
        values.append(estimate(len(task), passed))
    return sum(values) / len(values)
