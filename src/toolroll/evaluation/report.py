"""Write `summary.json` from a `Summary`. It contains all numbers for a table in a paper.

Invariants:

- Excluded episodes are counted, and reported in a warning. Each rate contains the number of tasks
  that it covers. If episodes are missing, `pass_bounds` has the rates that they could lead to.
- A number that cannot be computed without bias is null, and `warnings` contains the reason.
- The same episodes always give the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.pass_at_k import (
    Estimate,
    UnequalSamplesError,
    mean_over_tasks,
    pass_bounds,
    pass_estimates,
    passed,
)
from toolroll.rollout.runs.run_directory import write_whole
from toolroll.rollout.runs.summary import Summary, as_count
from toolroll.rollout.template.cursor import KEPT
from toolroll.rollout.types import Status, StopReason

FILE_NAME = "summary.json"
SCHEMA_VERSION = 1
_DIGITS = 1000


def report(
    summary: Summary,
    *,
    floor: Summary | None = None,
    settings: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    planned: Mapping[str, int] = {},
    allow_unequal: bool = False,
    provenance: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the part of `summary.json` for one environment.

    `floor`: the result of the do-nothing agent on the same tasks. `seconds`: the wall time
    of playing, by all commands that were not killed. `planned`: the number of samples of each task
    in a finished run. `provenance`: as in `run.json`.
    """
    rewards, sizes = summary.rewards, summary.sizes(planned)
    total = sum(sizes.values())
    lost = [task for task in sizes if not rewards.get(task)]
    warnings = _warnings(summary, lost, settings)
    if summary.episodes < total:
        warnings.insert(0, f"the run is not finished: {summary.episodes} of {total} episodes")
    rates: dict[str, dict[int, Estimate]] | None = None
    if summary.graded:
        try:
            rates = pass_estimates(rewards, allow_unequal=allow_unequal)
        except UnequalSamplesError as error:
            warnings.append(f"no pass@k and no pass^k: {error}")
    task_means = [sum(samples) / len(samples) for samples in rewards.values()]
    coverage = {"tasks": len(rewards), "of_tasks": len(sizes)}
    return {
        "trainable": summary.trainable,
        "episodes": summary.episodes,
        "graded": summary.graded,
        "aborted": summary.statuses["aborted"],
        "reruns": as_count(summary.totals["reruns"]),
        **coverage,
        "lost": {
            "episodes": total - summary.graded,
            "of_episodes": total,
            "share": _share(total - summary.graded, total) or 0.0,
            "tasks": len(lost),
        },
        "reward": asdict(mean_over_tasks(task_means)) | coverage if task_means else None,
        "pass^k": _by_k(rates, "pass^k", coverage),
        "pass@k": _by_k(rates, "pass@k", coverage),
        "pass_bounds": _bounds(rewards, sizes) if summary.graded < total else None,
        "do_nothing": _floor(floor),
        "statuses": dict(sorted(summary.statuses.items())),
        "stop_reasons": {str(name): count for name, count in sorted(summary.stop_reasons.items())},
        **_counts_and_latencies(summary),
        "by_task": by_task(summary, sizes),
        "warnings": warnings,
        "seconds": seconds,
        "settings": dict(settings or {}),
        "provenance": [dict(entry) for entry in provenance],
    }


def report_of(
    summary: Summary,
    written: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
    *,
    unfinished: str | None = None,
) -> dict[str, Any]:
    """Return the report that a run has `written`, if it is of the episodes in `summary`, which are
    all that its folder has. Otherwise, return one of these episodes, with the warning `unfinished`.
    """
    computed = report(summary, settings=settings)
    if all(computed[name] == written.get(name) for name in ("statuses", "stop_reasons")):
        return dict(written)
    if unfinished is not None:
        computed["warnings"].insert(0, unfinished)
    return computed


def _counts_and_latencies(summary: Summary) -> dict[str, Any]:
    """Return the numbers of turns, tokens and calls, and the latencies in seconds."""
    totals = summary.totals
    attempts = as_count(totals["tool_calls"])
    return {
        "turns": _total(summary, "turns"),
        "tokens": {
            name: _total(summary, f"{name}_tokens")
            for name in ("prompt", "completion", "trained", "recomputed")
            if f"{name}_tokens" in totals
        }
        | {
            "delivered": _share(totals["trained_tokens"], totals["completion_tokens"])
            if summary.trainable
            else None,
            "cached_share": summary.cached_share,
        },
        "prefix_trie": {
            "flat_tokens": summary.flat_tokens,
            "trie_tokens": summary.trie_tokens,
            "ratio": _share(summary.flat_tokens, summary.trie_tokens),
        },
        "tool_calls": {"attempted": attempts, "by_tool": tool_rates(summary)},
        "invalid_calls": {
            "total": as_count(totals["invalid_calls"]),
            "rate": _share(totals["invalid_calls"], attempts),
            "by_kind": {
                kind: {"count": n, "rate": _share(n, attempts)}
                for kind, n in sorted(summary.named("invalid_calls").items())
            },
        },
        "lookalike_calls": int(totals["lookalike_calls"]),
        "latency": {
            "engine_turn": _percentiles(summary.turn_seconds),
            "env_step_mean": _share(
                totals["env_seconds"] - totals["user_seconds"], totals["turns"] + summary.episodes
            ),
            "user_call_mean": _share(totals["user_seconds"], totals["user_calls"]),
            "episode_mean": _share(totals["seconds"], summary.episodes),
        },
        "user_simulator": {
            name: as_count(totals[f"user_{name}"])
            for name in ("calls", "prompt_tokens", "completion_tokens", "retries", "errors")
        },
        "environment_errors": {
            name: as_count(totals[f"{name}_errors"]) for name in ("metrics", "close")
        },
        "judge": _agreement(summary),
        "token_mismatches": summary.mismatches,
        "forks": as_count(totals["forks"]),
        "fork_reasons": dict(sorted(summary.fork_reasons.items())),
    }


def tool_rates(summary: Summary) -> dict[str, dict[str, float | int | None]]:
    """Return the number of executed calls, the number of errors and the error rate for each tool.
    The errors and the rate are None if the environment does not report errors by tool.
    """
    calls, errors = summary.named("executed_calls"), summary.named("tool_errors")
    has_errors = bool(errors) or not summary.totals["tool_errors"]
    return {
        name: {
            "calls": count,
            "errors": errors.get(name, 0) if has_errors else None,
            "error_rate": errors.get(name, 0) / count if has_errors else None,
        }
        for name, count in sorted(calls.items())
    }


def by_task(summary: Summary, tasks: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the graded rewards of each of `tasks`, in sample order, and the number of its aborted
    episodes.
    """
    rewards = summary.rewards
    return {
        name: {"rewards": rewards.get(name, []), "aborted": summary.aborted[name]}
        for name in sorted(tasks, key=_natural)
    }


def write_summary(folder: Path, reports: Mapping[str, Mapping[str, Any]]) -> Path:
    """Replace `summary.json` atomically. The parts of other environments are kept."""
    path = folder / FILE_NAME
    data = {
        "schema_version": SCHEMA_VERSION,
        "environments": read_summary(folder) | {name: dict(part) for name, part in reports.items()},
    }
    write_whole(path, data)
    return path


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the parts of `summary.json` by environment, or {} if there is no such file. Raise
    `UsageError` if the file cannot be read.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return {}
    try:
        data = orjson.loads(path.read_bytes())
        if data["schema_version"] != SCHEMA_VERSION:
            raise UsageError(
                f"{path} has schema version {data['schema_version']!r}; this toolroll reads "
                f"{SCHEMA_VERSION}"
            )
        return dict(data["environments"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read ({error!r}): delete it; toolroll run writes it again"
        ) from error


_FEW = 0.03
"""The share of truncated episodes that needs no warning."""


def _warnings(
    summary: Summary, lost: Sequence[str], settings: Mapping[str, Any] | None
) -> list[str]:
    lines = []
    cut = summary.stop_reasons[StopReason.LENGTH.value]
    if cut > _FEW * summary.episodes:
        limit = (settings or {}).get("max_new_tokens", "its limit")
        lines.append(
            f"{cut} of {summary.episodes} episodes ended because a turn reached --max-new-tokens "
            f"({limit}) or the end of the context: their rewards are those of truncated replies"
        )
    if full := summary.stop_reasons[StopReason.CONTEXT_FULL.value]:
        lines.append(
            f"{full} of {summary.episodes} episodes ended because the next prompt left no room to "
            "answer in the context (--context-length): their rewards are those of episodes that "
            "were cut"
        )
    if not summary.trainable:
        lines.append(
            "this is a baseline at an OpenAI-compatible endpoint: no tokens are recorded, so "
            "nothing can be trained on"
        )
    if summary.statuses["aborted"]:
        kinds = ", ".join(
            f"{reason} {count}"
            for reason, count in sorted(summary.stop_reasons.items())
            if reason in _ABORTING
        )
        lines.append(
            f"{summary.statuses['aborted']} of {summary.episodes} episodes were aborted and "
            f"excluded from rewards: {kinds}"
        )
    if reruns := as_count(summary.totals["reruns"]):
        lines.append(
            f"attempts that failed outside the model (engine, environment, user, time limit) and "
            f"were retried: {reruns} (each was logged). If the model's own actions make an "
            "environment fail, retries bias the samples (--reruns 0 turns them off)"
        )
    if late := summary.totals["metrics_errors"] + summary.totals["close_errors"]:
        lines.append(
            f"calls of an environment's metrics or close that failed: {as_count(late)}; the log "
            "names the episodes, whose rewards are not affected"
        )
    if outside := sum(
        not (0 <= reward <= 1) and not passed(reward)
        for samples in summary.samples.values()
        for reward in samples.values()
    ):
        lines.append(
            f"{outside} rewards are outside [0, 1]; only a reward of 1 is a pass, so pass^k and "
            "pass@k may mean nothing for this environment: use the mean reward"
        )
    if lost:
        lines.append(
            f"tasks without a graded episode, in neither pass^k nor pass@k ({len(lost)}): "
            f"{_first(sorted(lost, key=_natural), 5)}"
        )
    if excluded := {kind: n for kind, n in summary.mismatches.items() if kind not in KEPT}:
        lines.append(f"token mismatches: {excluded}; the samples are excluded from training")
    return lines


def _first(names: Sequence[str], count: int) -> str:
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more} more" if more > 0 else "")


_ABORTING = frozenset(reason.value for reason in StopReason if reason.status is Status.ABORTED)


def _floor(floor: Summary | None) -> dict[str, Any] | None:
    if floor is None:
        return None
    return {
        "episodes": floor.episodes,
        "passed": floor.passed,
        "pass_rate": floor.pass_rate,
        "reward_mean": floor.mean_reward,
        "aborted": floor.statuses["aborted"],
    }


def _by_k(
    rates: Mapping[str, Mapping[int, Estimate]] | None, kind: str, coverage: Mapping[str, int]
) -> dict[str, dict[str, float]] | None:
    if rates is None:
        return None
    return {str(k): {**asdict(estimate), **coverage} for k, estimate in rates[kind].items()}


def _bounds(
    rewards: Mapping[str, Sequence[float]], sizes: Mapping[str, int]
) -> dict[str, dict[str, list[float]]]:
    """Return [low, high] by k, under the names of the rates."""
    return {
        name: {str(k): list(pair) for k, pair in by_k.items()}
        for name, by_k in pass_bounds(rewards, sizes).items()
    }


def _total(summary: Summary, name: str) -> dict[str, float]:
    return {"total": as_count(summary.totals[name]), "mean": summary.mean(name)}


def _agreement(summary: Summary) -> dict[str, float] | None:
    """Return how often a judge and a rule agree, or None if no episode has both."""
    counts, episodes = summary.judged, summary.judged.total()
    if not episodes:
        return None
    return {
        "episodes": episodes,
        "agreement": (counts[True, True] + counts[False, False]) / episodes,
        "passed_by_rule_only": counts[True, False],
        "passed_by_judge_only": counts[False, True],
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    shares = np.percentile(values, [50, 95, 99]).tolist()
    return {
        "mean": float(np.mean(values)),
        **dict(zip(("p50", "p95", "p99"), shares, strict=True)),
    }


def _natural(name: str) -> list[str | int]:
    """Return a key that sorts `task-10` after `task-9`."""
    return [
        # Python limits the digits of an int.
        int(part[:_DIGITS]) if part.isdecimal() else part
        for part in re.split(r"(\d+)", name)
    ]
