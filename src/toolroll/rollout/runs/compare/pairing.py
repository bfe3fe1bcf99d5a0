"""`Pairing`: the samples that two runs have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolroll.rollout.runs.compare.run import ComparedRun, PlayedSample

Pair = tuple[PlayedSample, PlayedSample]


@dataclass(frozen=True, slots=True)
class Pairing:
    """The pairs of samples by task, each of which both runs have graded.

    `samples` and `tasks` are those that at least one run has. `changed` are the tasks whose data
    differ. `aborted` has the number of aborted samples of each run.
    """

    pairs: dict[str, list[Pair]]
    tasks: int
    samples: int
    changed: list[str]
    aborted: tuple[int, int]

    @property
    def count(self) -> int:
        """The number of pairs."""
        return sum(map(len, self.pairs.values()))

    def rewards(self) -> dict[str, tuple[list[float], list[float]]]:
        """Return the rewards of both runs by task, pair by pair."""
        return {
            task: ([_graded(a) for a, _ in pairs], [_graded(b) for _, b in pairs])
            for task, pairs in self.pairs.items()
        }


def pair(
    base: ComparedRun, candidate: ComparedRun, *, by_seed: bool, changed_tasks: bool
) -> Pairing:
    """Pair the samples of a task that have the same seed, or the same number if `by_seed` is False.

    An aborted sample is in no pair. If `changed_tasks` is False, leave out the tasks whose data
    differ.
    """
    key: Callable[[PlayedSample], int] = lambda sample: sample.seed if by_seed else sample.number
    pairs: dict[str, list[Pair]] = {}
    changed, samples = [], 0
    tasks = sorted({*base.tasks, *candidate.tasks})
    for task in tasks:
        sides = [{key(s): s for s in run.tasks.get(task, ())} for run in (base, candidate)]
        samples += len({*sides[0], *sides[1]})
        hashes = [{sample.task_hash for sample in side.values()} for side in sides]
        if all(hashes) and hashes[0] != hashes[1]:
            changed.append(task)
            if not changed_tasks:
                continue
        both = [(sides[0][k], sides[1][k]) for k in sorted(sides[0].keys() & sides[1].keys())]
        graded = [(a, b) for a, b in both if a.reward is not None and b.reward is not None]
        if graded:
            pairs[task] = graded
    aborted = [
        sum(s.reward is None for part in run.tasks.values() for s in part)
        for run in (base, candidate)
    ]
    return Pairing(pairs, len(tasks), samples, changed, (aborted[0], aborted[1]))


def _graded(sample: PlayedSample) -> float:
    assert sample.reward is not None
    return sample.reward
