"""Write a run as logs of Inspect, one for each environment, for `inspect view` and
`inspect_ai.log`:

    python examples/exports/to_inspect.py out/base out/logs
    inspect view --log-dir out/logs

A task is a sample of the log, and a sample of a task is an epoch. Aborted episodes have an error
and no score. Tokens, images and events are left out; `toolroll export --format atif` has tokens.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from toolroll import Episode, Message, Status, Summary
from toolroll.evaluation.export.exported_run import ExportedRun, is_graded
from toolroll.evaluation.export.messages import calls_of, text_of
from toolroll.evaluation.report import read_summary
from toolroll.evaluation.reward_reason import reward_reason
from toolroll.rollout.runtime.disk import new_folder
from toolroll.rollout.runtime.jsonable import json_bytes

_OF_RESULT = "status stop_reason info metrics".split()
_NO_TRACE = {"traceback": "", "traceback_ansi": ""}
_IN_SUMMARY = "id epoch input target scores model_usage total_time completed".split()


def write_inspect_logs(run: ExportedRun, folder: Path) -> None:
    """Write `DATE_ENV.eval` for each environment into the new `folder`."""
    with new_folder(folder):
        for env in run.tasks:
            name = re.sub(r"[^A-Za-z0-9.-]+", "-", env)
            name = f"{_started(run, env):%Y-%m-%dT%H-%M-%S}_{name}.eval"
            _write_log(run, env, folder / name)


def _write_log(run: ExportedRun, env: str, path: Path) -> None:
    """Write one log: a zip file with a file for each sample, their summaries, and a header."""
    summary = Summary(env)
    rows: list[dict[str, Any]] = []
    model = "none"
    with ZipFile(path, "x", ZIP_DEFLATED) as log:
        for episode in run.episodes(env):
            summary.add(episode)
            model = episode.model or model
            sample = inspect_sample(episode)
            log.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json_bytes(sample))
            error = sample["error"] and sample["error"]["message"]
            rows.append({name: sample[name] for name in _IN_SUMMARY} | {"error": error})
        log.writestr("summaries.json", json_bytes(rows))
        log.writestr("header.json", json_bytes(_header(run, summary, model)))


def _started(run: ExportedRun, env: str) -> datetime:
    return datetime.fromisoformat(run.provenance(env)["date"])


def _header(run: ExportedRun, summary: Summary, model: str) -> dict[str, Any]:
    """Return the log without its samples. Its mean is over tasks, as in `summary.json`."""
    env, tasks, started = summary.env, run.tasks[summary.env], _started(run, summary.env)
    seconds = read_summary(run.folder).get(env, {}).get("seconds")
    means = [sum(rewards) / len(rewards) for rewards in summary.rewards.values()]
    numbers = {
        "mean": fmean(means) if means else None,
        "stderr": stdev(means) / len(means) ** 0.5 if len(means) > 1 else None,
    }
    score = {
        "name": "reward",
        "scorer": "reward",
        "scored_samples": summary.graded,
        "unscored_samples": summary.episodes - summary.graded,
        "metrics": {
            name: {"name": name, "value": value}
            for name, value in numbers.items()
            if value is not None
        },
    }
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "created": started.isoformat(),
            "task": env,
            "dataset": {"name": env, "samples": len(tasks), "sample_ids": list(tasks)},
            "model": model,
            "config": {"epochs": max(tasks.values()), "epochs_reducer": ["mean"]},
            "metadata": {"settings": run.settings(env), "provenance": run.provenance(env)},
        },
        "results": {
            "total_samples": summary.episodes,
            "completed_samples": summary.episodes - summary.statuses["aborted"],
            "scores": [score],
        },
        "stats": {
            "started_at": started.isoformat(),
            "completed_at": (started + timedelta(seconds=seconds)).isoformat() if seconds else "",
            "model_usage": {model: _usage(summary.totals)},
        },
    }


def inspect_sample(episode: Episode) -> dict[str, Any]:
    """Return `episode` as an `EvalSample`."""
    result = episode.result
    messages = [_message(message, episode.model) for message in result.messages]
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    error = {"message": f"{result.stop_reason}: {reward_reason(result.info)}"}
    return {
        "id": episode.task_id,
        "epoch": episode.sample + 1,
        "input": messages[: replies[0] if replies else None],
        "target": "",
        "messages": messages,
        "output": {"choices": [{"message": messages[index]} for index in replies[-1:]]},
        "scores": {"reward": {"value": result.reward}} if is_graded(episode) else None,
        "metadata": {"seed": episode.seed, "task_hash": episode.task_hash}
        | {name: getattr(result, name) for name in _OF_RESULT},
        "model_usage": {episode.model or "none": _usage(result.metrics)},
        "total_time": result.metrics.get("seconds"),
        "completed": True,
        "error": error | _NO_TRACE if result.status is Status.ABORTED else None,
    }


def _message(message: Message, model: str) -> dict[str, Any]:
    role, text = message.get("role"), text_of(message.get("content"))
    if role == "tool":
        call, function = message.get("tool_call_id"), message.get("name")
        return {"role": role, "content": text, "tool_call_id": call, "function": function}
    if role != "assistant":
        return {"role": "user" if role == "user" else "system", "content": text}
    calls = [call._asdict() for call in calls_of(message)]
    parts = [{"type": "text", "text": text}]
    if reasoning := message.get("reasoning_content"):
        parts.insert(0, {"type": "reasoning", "reasoning": str(reasoning)})
    return {"role": role, "content": parts, "tool_calls": calls or None, "model": model}


def _usage(metrics: Mapping[str, float]) -> dict[str, int]:
    """Return the counts of tokens. In Inspect, input tokens do not include cached tokens."""
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    prompt, cached, sampled = (int(metrics.get(name, 0)) for name in names)
    return {
        "input_tokens": prompt - cached,
        "input_tokens_cache_read": cached,
        "output_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the run that the `arguments` of the command line name."""
    parser = argparse.ArgumentParser(description="Write a run as logs of Inspect.")
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--env", help="export only this environment")
    given = parser.parse_args(arguments)
    run = ExportedRun(given.run, given.env)
    write_inspect_logs(run, given.out)
    print(*run.bad_lines, f"inspect view --log-dir {given.out} shows it", sep="\n")


if __name__ == "__main__":
    main()
