"""`compare`: the difference between runs, as plain data.

Invariants: both sides of each number cover the same samples. An aborted episode counts only as
aborted. Runs that differ in more than the model are refused, unless the difference is allowed.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from toolroll.evaluation.compare.difference import Difference, holm, mcnemar, tasks_for_gate
from toolroll.evaluation.compare.identity import KINDS, MODEL, OF_A_MODEL, TASKS, unlike
from toolroll.evaluation.compare.pairing import Pairing, pair
from toolroll.evaluation.compare.run import ComparedRun
from toolroll.evaluation.run_config import played_with
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.pass_at_k import pass_hat_k, passed

Rewards = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""The rewards of the baseline and of the candidate by task, pair by pair."""

SIGNIFICANT = 0.05
_USAGE = (
    "turns prompt_tokens completion_tokens tool_calls invalid_calls tool_errors user_calls "
    "user_cost engine_seconds seconds"
).split()


@dataclass(frozen=True, slots=True)
class Question:
    """What a comparison is to answer.

    `allowed`: the differences between the runs (`KINDS`, `TASKS` and `MODEL`) that are accepted.
    In rewards: `fail_if_worse`, the loss that is too much; `margin`, the difference that does not
    matter; `power_for`, the difference that further runs are to show.
    """

    allowed: Collection[str] = ()
    fail_if_worse: float | None = None
    margin: float | None = None
    power_for: float | None = None

    def __post_init__(self) -> None:
        names = (*KINDS, TASKS, MODEL)
        if unknown := set(self.allowed) - set(names):
            raise UsageError(f"--allow-different {min(unknown)}: the names are {', '.join(names)}")

    @property
    def accepted(self) -> set[str]:
        """The kinds of differences that are accepted."""
        return {*self.allowed, *(OF_A_MODEL if MODEL in self.allowed else ())}

    def check_rewards(self, span: float) -> None:
        """Raise `UsageError` if a difference is larger than any between rewards that lie within
        `span`.
        """
        for name in ("fail_if_worse", "margin", "power_for"):
            if (getattr(self, name) or 0.0) >= span:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {getattr(self, name):g}, in rewards, and these "
                    f"rewards differ by at most {span:g}: two points of a hundred are 0.02"
                )

    def pairing(self, base: ComparedRun, candidate: ComparedRun) -> Pairing:
        """Return the samples that are compared."""
        by_seed, changed_tasks = "seed" not in self.allowed, TASKS in self.allowed
        return pair(base, candidate, by_seed=by_seed, changed_tasks=changed_tasks)


def compare(
    base: Mapping[str, ComparedRun],
    candidates: Sequence[Mapping[str, ComparedRun]],
    question: Question,
) -> list[dict[str, Any]]:
    """Return one comparison for each environment that `base` and a candidate have in common.

    The verdict is about the mean reward. With `fail_if_worse`, the reward may fall by that much
    ("no worse"), and a run that is not finished makes "no worse" and "better" inconclusive. With
    several comparisons, its p-value has Holm's correction. Raise `UsageError` if there is nothing
    to compare, or if the runs differ in something that is not allowed.
    """
    runs = [
        (run, candidate[env])
        for env, run in sorted(base.items())
        for candidate in candidates
        if env in candidate
    ]
    if not runs:
        names = [", ".join(sorted(run)) or "no finished episode" for run in (base, *candidates)]
        again = _play_again(base[min(base)], "MODEL") if base else ""
        raise UsageError(f"the runs have no environment in common: {'; '.join(names)}{again}")
    level = SIGNIFICANT / len(runs)
    comparisons = [_compared(*pair_of_runs, question, level) for pair_of_runs in runs]
    limit = 0.0 - (question.fail_if_worse or 0.0)  # not -0.0
    corrected = holm([comparison["reward"]["p"] for comparison in comparisons])
    for comparison, p_value in zip(comparisons, corrected, strict=True):
        reward = comparison["reward"]
        reward |= {"limit": limit, "p_holm": p_value}
        rose = reward["difference"] > 0 and reward["p_unchanged"] <= level
        good = "better" if question.fail_if_worse is None or rose else "no worse"
        verdict = "worse" if reward["difference"] < limit else good
        open_gate = question.fail_if_worse is not None and any(comparison["unfinished"].values())
        open_gate &= p_value <= SIGNIFICANT and verdict != "worse"
        sure = p_value <= SIGNIFICANT and not open_gate
        comparison["verdict"] = verdict if sure else "inconclusive"
        if "gate" in comparison:
            comparison["gate"]["open"] = open_gate  # only because a run is not finished
    return comparisons


def _compared(
    base: ComparedRun, candidate: ComparedRun, question: Question, level: float
) -> dict[str, Any]:
    runs = f"{base.env}: {base.folder} and {candidate.folder}"
    different, pairing = unlike(base, candidate), question.pairing(base, candidate)
    _refuse_other_tasks(base, candidate, pairing)
    if refused := different.keys() - {"", *question.accepted}:
        lines = "\n  ".join(
            f"{kind}: {line.removeprefix(f'{kind}: ')}"
            for kind in refused
            for line in different[kind]
        )
        kinds = sorted(refused)
        if refused >= OF_A_MODEL:
            kinds = [MODEL, *sorted(refused - OF_A_MODEL)]
        options = " ".join(f"--allow-different {kind}" for kind in kinds)
        raise UsageError(
            f"{runs} differ in more than the model:\n  {lines}\nTo allow it: {options}"
        )
    if not pairing.pairs:
        count = len(pairing.coverage["other_data"])
        other = f"; tasks with other data: {count} (to allow it: --allow-different {TASKS})"
        raise UsageError(f"{runs} have no graded sample in common{other if count else ''}")
    rewards = pairing.rewards
    return {
        "env": base.env,
        "base": base.folder,
        "candidate": candidate.folder,
        "setup": {"base": played_with(base.facts), "candidate": played_with(candidate.facts)},
        "coverage": pairing.coverage,
        "unfinished": {"baseline": base.unfinished, "candidate": candidate.unfinished},
        **_answers(rewards, question, level),
        "pass^k": _pass_hat(rewards),
        "mcnemar": _mcnemar(rewards),
        "changed": _changed(rewards),
        "usage": _usage(pairing),
        "settings": [line for lines in different.values() for line in lines],
    }


def _refuse_other_tasks(base: ComparedRun, candidate: ComparedRun, pairing: Pairing) -> None:
    """Raise `UsageError` if the runs played other tasks: no name is in both, or the runs have other
    splits, and other data for each name that is in both.
    """
    runs = base, candidate
    common = base.tasks.keys() & candidate.tasks.keys()
    splits = [run.facts.get("split") for run in runs]
    if common and (splits[0] == splits[1] or common - set(pairing.coverage["other_data"])):
        return
    if not pairing.pairs:
        played = [
            f"{side}, {run.folder}: split {split or 'not recorded'}, {len(run.tasks)} "
            f"task{'s' * (len(run.tasks) > 1)}, such as {min(run.tasks)}"
            for side, split, run in zip(("baseline", "candidate"), splits, runs, strict=True)
        ]
        again = _play_again(base, candidate.facts.get("model") or "MODEL")
        problem = "the runs have no task in common"
        if common:
            problem = "the tasks of the same names have other data"
            options = f"--allow-different {TASKS} --allow-different benchmark"
            again += f"\nTo compare the tasks of the same names nevertheless: {options}"
        raise UsageError("\n  ".join([f"{base.env}: {problem}:", *played]) + again)


def _play_again(base: ComparedRun, model: str) -> str:
    """Return the command that makes a candidate for `base`, or "" if no command made `base`."""
    if not base.facts.get("split"):
        return ""
    words = f"toolroll run {base.env} --from".split()
    command = shlex.join([*words, base.folder, "--model", model, "--out", "FOLDER"])
    how = "with the candidate's model, and with its settings that differ"
    return f"\nPlay the baseline's tasks {how}, and compare this:\n  {command}"


def _answers(rewards: Rewards, question: Question, level: float) -> dict[str, Any]:
    """Return the difference of the mean reward, and what follows from it. `level`: the significance
    that a gate needs.
    """
    every = [reward for sides in rewards.values() for side in sides for reward in side]
    means = [(fmean(before), fmean(after)) for before, after in rewards.values()]
    difference = Difference.of(means, max(1.0, *every) - min(0.0, *every))
    question.check_rewards(difference.span)
    reward = _shown(means, difference)
    reward["least_error"] = difference.least_error
    reward["p_unchanged"] = difference.p_value()
    reward["p"] = difference.p_value(-(question.fail_if_worse or 0.0))
    answers: dict[str, Any] = {
        "reward": reward,
        "span": difference.span,
        "detectable": difference.detectable,
    }
    if (loss := question.fail_if_worse) is not None:
        needed = tasks_for_gate(loss, difference.span, level)
        answers["gate"] = {"loss": loss, "tasks_if_unchanged": needed}
    if (true := question.power_for) is not None:
        power, tasks = difference.power(true), difference.tasks_for(true)
        answers["power_for"] = {"difference": true, "power": power, "tasks": tasks}
    if question.margin is not None:
        p_value = difference.p_not_equivalent(question.margin)
        answers["equivalence"] = {"margin": question.margin, "p": p_value}
    return answers


def _shown(means: Sequence[tuple[float, float]], difference: Difference) -> dict[str, Any]:
    low, high = difference.interval()
    return {
        "base": fmean(before for before, _ in means),
        "candidate": fmean(after for _, after in means),
        "difference": difference.value,
        "low": low,
        "high": high,
        "tasks": difference.tasks,
    }


def _pass_hat(rewards: Rewards) -> dict[str, dict[str, Any]]:
    """Return pass^k of both runs by k. Each k covers the tasks that have at least k pairs."""
    by_k = {}
    for k in range(1, max(len(before) for before, _ in rewards.values()) + 1):
        means = [
            (pass_hat_k([before], k), pass_hat_k([after], k))
            for before, after in rewards.values()
            if len(before) >= k
        ]
        by_k[str(k)] = _shown(means, Difference.of(means))
    return by_k


def _mcnemar(rewards: Rewards) -> dict[str, Any] | None:
    """Return McNemar's exact test, or None if a task has several samples."""
    if any(len(before) > 1 for before, _ in rewards.values()):
        return None
    passes = [(passed(before[0]), passed(after[0])) for before, after in rewards.values()]
    worse, better = passes.count((True, False)), passes.count((False, True))
    return {"worse": worse, "better": better, "p": mcnemar(worse, better)}


def _changed(rewards: Rewards) -> dict[str, list[dict[str, Any]]]:
    """Return the tasks whose mean reward changed, the largest changes first."""
    means = [(task, fmean(before), fmean(after)) for task, (before, after) in rewards.items()]
    means.sort(key=lambda row: -abs(row[2] - row[1]))
    return {
        name: [
            {"task": task, "base": before, "candidate": after}
            for task, before, after in means
            if (after - before) * sign > 0
        ]
        for name, sign in (("worse", -1), ("better", 1))
    }


def _usage(pairing: Pairing) -> dict[str, dict[str, float]]:
    """Return the means of metrics over the paired samples, if an episode has the metric."""
    pairs = [pair_of_samples for group in pairing.pairs.values() for pair_of_samples in group]
    sides = dict(zip(("base", "candidate"), zip(*pairs, strict=True), strict=True))
    return {
        metric: {
            side: fmean(sample.metrics.get(metric, 0.0) for sample in samples)
            for side, samples in sides.items()
        }
        for metric in _USAGE
        if any(metric in sample.metrics for samples in sides.values() for sample in samples)
    }
