"""`write_inspect_logs`: writes a log of Inspect for each environment, for `inspect view` and
`inspect_ai.log`.

A task is a sample of the log, and a sample of a task is an epoch. Aborted episodes have an error
and no score. Tokens, images and events are left out; `toolroll export --format atif` has tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from toolroll.rollout.runs.export.messages import calls_of, text_of
from toolroll.rollout.runs.export.recorded_run import (
    RecordedRun,
    file_part,
    is_graded,
    new_folder,
    standard_error,
)
from toolroll.rollout.runs.totals import Summary
from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.types import Episode, InteractionResult, Message

_STOPS = {"stop": "stop", "length": "max_tokens"}
_IN_SUMMARY = ("id", "epoch", "input", "target", "scores", "model_usage", "total_time")


def write_inspect_logs(run: RecordedRun, folder: Path) -> list[Path]:
    """Write a log file for each environment into the new `folder`. Return the files."""
    paths = []
    with new_folder(folder):
        for env in run.tasks:
            started = run.started(env)
            name = f"{started:%Y-%m-%dT%H-%M-%S}_{file_part(env).replace('_', '-')}_{_id(env)}.eval"
            _write_log(run, env, folder / name)
            paths.append(folder / name)
    return paths


def _write_log(run: RecordedRun, env: str, path: Path) -> None:
    """Write one log: a zip file with a file for each sample, their summaries, and a header."""
    summary = Summary(env)
    shortened: list[dict[str, Any]] = []
    model = "none"
    with ZipFile(path, "w", ZIP_DEFLATED) as log:
        for episode in run.episodes(env):
            summary.add(episode)
            model = episode.model or model
            sample = inspect_sample(episode)
            log.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json_bytes(sample))
            error = sample["error"]
            shortened.append(
                {key: sample[key] for key in _IN_SUMMARY if key in sample}
                | {"error": error and error["message"], "completed": True}
                | {"message_count": len(sample["messages"])}
            )
        start = {"version": 2, "eval": _spec(run, summary, model), "plan": {}}
        log.writestr("_journal/start.json", json_bytes(start))
        log.writestr("summaries.json", json_bytes(shortened))
        log.writestr("header.json", json_bytes(start | _outcome(run, summary, model)))


def _spec(run: RecordedRun, summary: Summary, model: str) -> dict[str, Any]:
    env, settings, provenance = summary.env, run.settings(summary.env), run.provenance(summary.env)
    tasks = sorted(run.tasks[env])
    rewards = summary.samples.values()
    return {
        "created": run.started(env).isoformat(),
        "eval_id": _id(f"{env} {provenance['date']}"),
        "run_id": _id(provenance["date"]),
        "task": env,
        "task_id": _id(env),
        "solver": settings.get("agent"),
        "dataset": {"name": env, "samples": len(tasks), "sample_ids": tasks, "shuffled": False},
        "model": model,
        "config": {
            "epochs": 1 + max((sample for task in rewards for sample in task), default=0),
            "epochs_reducer": ["mean"],
        },
        "packages": {"toolroll": str(provenance.get("toolroll") or "unknown")},
        "metadata": {"settings": settings, "provenance": provenance},
    }


def _outcome(run: RecordedRun, summary: Summary, model: str) -> dict[str, Any]:
    """Return the results. The mean reward is the mean over tasks of the mean of their samples."""
    means = [sum(rewards) / len(rewards) for rewards in summary.rewards.values()]
    error = standard_error(means)
    numbers = ({"mean": sum(means) / len(means)} if means else {}) | (
        {"stderr": error} if error is not None else {}
    )
    ended = run.ended(summary.env)
    score = {
        "name": "reward",
        "scorer": "reward",
        "scored_samples": summary.graded,
        "unscored_samples": summary.episodes - summary.graded,
        "metrics": {name: {"name": name, "value": number} for name, number in numbers.items()},
    }
    return {
        "status": "success",
        "results": {
            "total_samples": summary.episodes,
            "completed_samples": summary.episodes - summary.statuses["aborted"],
            "scores": [score],
        },
        "stats": {
            "started_at": run.started(summary.env).isoformat(),
            "completed_at": ended.isoformat() if ended else "",
            "model_usage": {model: _usage(summary.totals)},
        },
    }


def inspect_sample(episode: Episode) -> dict[str, Any]:
    """Return `episode` as an `EvalSample`."""
    result = episode.result
    messages = [_message(message, episode.model) for message in result.messages]
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    usage = {episode.model or "none": _usage(result.metrics)}
    return {
        "id": episode.task_id,
        "epoch": episode.sample + 1,
        "input": messages[:first],
        "target": "",
        "messages": messages,
        "output": _output(result, messages, episode.model),
        "scores": {"reward": {"value": result.reward}} if is_graded(episode) else None,
        "metadata": {
            "seed": episode.seed,
            "task_hash": episode.task_hash,
            "status": result.status.value,
            "stop_reason": str(result.stop_reason),
            "info": result.info,
            "metrics": result.metrics,
        },
        "model_usage": usage,
        "total_time": result.metrics.get("seconds"),
        "error": None if result.status.value != "aborted" else _error(result),
    }


def _error(result: InteractionResult) -> dict[str, str]:
    error = result.info.get("error")
    text = error.get("message") if isinstance(error, Mapping) else None
    message = f"{result.stop_reason}: {text}" if text else str(result.stop_reason)
    return {"message": message, "traceback": message, "traceback_ansi": message}


def _output(
    result: InteractionResult, messages: Sequence[dict[str, Any]], model: str
) -> dict[str, Any]:
    said = [message for message in messages if message["role"] == "assistant"]
    turns = result.trajectories[-1].turns if result.trajectories else ()
    reason = _STOPS.get(turns[-1].finish_reason, "unknown") if turns else "unknown"
    choices = [{"message": message, "stop_reason": reason} for message in said[-1:]]
    return {"model": model, "choices": choices}


def _message(message: Message, model: str) -> dict[str, Any]:
    role, text = message.get("role"), text_of(message.get("content"))
    if role == "tool":
        return {
            "role": "tool",
            "content": text,
            "tool_call_id": message.get("tool_call_id"),
            "function": message.get("name"),
        }
    if role != "assistant":
        return {"role": "user" if role == "user" else "system", "content": text}
    calls = [
        {
            "id": call.id,
            "function": call.name,
            "arguments": call.arguments or {},
            "parse_error": None if call.arguments is not None else f"unreadable: {call.text}",
        }
        for call in calls_of(message)
    ]
    reasoning = message.get("reasoning_content")
    thought = [{"type": "reasoning", "reasoning": str(reasoning)}] if reasoning else []
    return {
        "role": "assistant",
        "content": [*thought, {"type": "text", "text": text}] if thought else text,
        "tool_calls": calls or None,
        "model": model,
        "source": "generate",
    }


def _usage(metrics: Mapping[str, float]) -> dict[str, int]:
    """Return the counts of tokens. In Inspect, input tokens do not include cached tokens."""
    prompt, cached, sampled = (
        int(metrics.get(f"{kind}_tokens", 0)) for kind in ("prompt", "cached", "completion")
    )
    return {
        "input_tokens": prompt - cached,
        "input_tokens_cache_read": cached,
        "output_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:22]
