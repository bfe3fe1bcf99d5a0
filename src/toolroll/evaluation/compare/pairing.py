"""`Pairing`: the samples that two runs have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolroll.evaluation.compare.run import ComparedRun, PlayedSample


@dataclass(frozen=True, slots=True)
class Pairing:
    """The pairs of samples by task, each of which both runs have graded, and the `coverage`: how
    many tasks and samples are paired, of those that at least one run has; the aborted samples of
    each run; and the tasks whose data differ.
    """

    pairs: dict[str, list[tuple[PlayedSample, PlayedSample]]]
    coverage: dict[str, Any]

    @property
    def rewards(self) -> dict[str, tuple[list[float], list[float]]]:
        """The rewards of both runs by task, pair by pair."""
        return {
            task: ([a.reward or 0.0 for a, _ in pairs], [b.reward or 0.0 for _, b in pairs])
            for task, pairs in self.pairs.items()
        }


def pair(
    base: ComparedRun, candidate: ComparedRun, *, by_seed: bool, changed_tasks: bool
) -> Pairing:
    """Pair the samples of a task that have the same seed, or the same number if `by_seed` is False
    or the seeds repeat, as those of sessions do.

    An aborted sample is in no pair. If `changed_tasks` is False, leave out the tasks whose data
    differ.
    """
    pairs: dict[str, list[tuple[PlayedSample, PlayedSample]]] = {}
    changed, samples = [], 0
    tasks = sorted({*base.tasks, *candidate.tasks})
    for task in tasks:
        sides = [run.tasks.get(task, ()) for run in (base, candidate)]
        seeds = by_seed and all(len({s.seed for s in side}) == len(side) for side in sides)
        first, second = ({s.seed if seeds else s.number: s for s in side} for side in sides)
        samples += len({*first, *second})
        hashes = [{sample.task_hash for sample in side.values()} for side in (first, second)]
        if all(hashes) and hashes[0] != hashes[1]:
            changed.append(task)
            if not changed_tasks:
                continue
        matched = [(first[k], second[k]) for k in sorted(first.keys() & second.keys())]
        graded = [(a, b) for a, b in matched if a.reward is not None and b.reward is not None]
        if graded:
            pairs[task] = graded
    coverage = {
        "tasks": len(pairs),
        "of_tasks": len(tasks),
        "samples": sum(map(len, pairs.values())),
        "of_samples": samples,
        "aborted": {"base": base.aborted, "candidate": candidate.aborted},
        "other_data": changed,
    }
    return Pairing(pairs, coverage)
