"""`write_lm_eval`: writes `results_*.json` and `samples_*.jsonl` as lm-evaluation-harness does.

An environment is a task of lm-eval (`a-b` for `a/b`), and a task is a document. The samples of a
task are the repeats of its document, and its metrics are means over them. Aborted episodes are left
out. A document has the task's id and hash, because the record does not have its data.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.export.recorded_run import (
    RecordedRun,
    file_part,
    is_graded,
    new_folder,
    standard_error,
)
from toolroll.rollout.runs.pass_at_k import pass_hat_k
from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.types import Episode

Documents = Sequence[dict[str, Any]]
"""The lines of one `samples_*.jsonl`."""


def write_lm_eval(run: RecordedRun, folder: Path) -> list[str]:
    """Write `MODEL/results_DATE.json`, and `MODEL/samples_ENV_DATE.jsonl` for each environment with
    a graded episode, into the new `folder`. Return the environments that have no pass^k, because
    their tasks have different numbers of graded samples.

    Raise `UsageError` if the run has several models, or no graded episode.
    """
    models: set[str] = set()
    results: dict[str, Any] = {}
    with new_folder(folder):
        by_env = {env: _documents(run.episodes(env), models) for env in run.tasks}
        by_env = {env: documents for env, documents in by_env.items() if documents}
        if len(models) != 1:
            why = f"several models ({', '.join(sorted(models))})" if models else "no graded episode"
            raise UsageError(f"{run.folder} has {why}, but lm-eval's results are those of a model")
        [model] = models
        started = min(run.started(env) for env in by_env)
        date = f"{started:%Y-%m-%dT%H-%M-%S.%f}"
        results |= _of_run(run.provenance(next(iter(by_env))), model)
        inside = folder / results["model_name_sanitized"]
        inside.mkdir()
        for env, documents in by_env.items():
            lines = [json_bytes(line, option=orjson.OPT_APPEND_NEWLINE) for line in documents]
            with (inside / f"samples_{file_part(env)}_{date}.jsonl").open("xb") as file:
                file.writelines(lines)
            for name, part in _of_environment(run, env, documents).items():
                results.setdefault(name, {})[file_part(env)] = part
        results["date"] = started.timestamp()
        text = json_bytes(results, option=orjson.OPT_INDENT_2)
        (inside / f"results_{date}.json").write_bytes(text)
    return [env for env, documents in by_env.items() if "pass^1" not in documents[0]]


def _documents(episodes: Iterable[Episode], models: set[str]) -> Documents:
    """Return the documents of an environment, in the order of its tasks. Add the models of its
    graded episodes to `models`.
    """
    by_task: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for episode in episodes:
        if is_graded(episode):
            models.add(episode.model)
            by_task[episode.task_index, episode.task_id].append(_sample(episode))
    counts = {len(samples) for samples in by_task.values()}
    most = counts.pop() if len(counts) == 1 else 0
    return [_document(by_task[task], most) for task in sorted(by_task)]


def _sample(episode: Episode) -> dict[str, Any]:
    result = episode.result
    turns = [turn for part in result.trajectories for turn in part.turns]
    return {
        "doc_id": episode.task_index,
        "doc": {"task_id": episode.task_id, "task_hash": episode.task_hash},
        "arguments": [result.prompt, dict(turns[0].sampling_params) if turns else {}],
        "response": result.response,
        "reward": result.reward,
    }


def _document(samples: Sequence[dict[str, Any]], most: int) -> dict[str, Any]:
    """Return the document of a task. It has pass^1 to pass^`most`."""
    first = samples[0]
    rewards = [sample["reward"] for sample in samples]
    metrics = {"reward": sum(rewards) / len(rewards)} | {
        f"pass^{k}": pass_hat_k([rewards], k) for k in range(1, most + 1)
    }
    prompt, params = first["arguments"]
    responses = [[sample["response"] for sample in samples]]
    return {
        "doc_id": first["doc_id"],
        "doc": first["doc"],
        "target": "",
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": params}},
        "resps": responses,
        "filtered_resps": responses,
        "filter": "none",
        "metrics": list(metrics),
        "doc_hash": _hash(json_bytes(first["doc"]).decode()),
        "prompt_hash": _hash(prompt),
        "target_hash": _hash(""),
        "rewards": rewards,
        **metrics,
    }


def _of_environment(run: RecordedRun, env: str, documents: Documents) -> dict[str, Any]:
    """Return the parts of `results_*.json` for `env`, by name."""
    names = documents[0]["metrics"]
    metrics: dict[str, Any] = {}
    for name in names:
        values = [document[name] for document in documents]
        error = standard_error(values)
        metrics[f"{name},none"] = sum(values) / len(values)
        metrics[f"{name}_stderr,none"] = "N/A" if error is None else error
    repeats = max(len(document["rewards"]) for document in documents)
    hashes = (
        document[f"{kind}_hash"] for document in documents for kind in ("doc", "prompt", "target")
    )
    versions = run.provenance(env).get("benchmark") or {}
    return {
        "results": {"name": file_part(env), "alias": env, "sample_len": len(documents), **metrics},
        "group_subtasks": [],
        "configs": {
            "task": file_part(env),
            "output_type": "generate_until",
            "repeats": repeats,
            "metadata": run.settings(env),
        },
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or None,
        "n-shot": 0,
        "higher_is_better": dict.fromkeys(names, True),
        "n-samples": {"original": len(run.tasks[env]), "effective": len(documents)},
        "task_hashes": _hash("".join(hashes)),
    }


def _of_run(provenance: Mapping[str, Any], model: str) -> dict[str, Any]:
    return {
        "config": {"model": "toolroll", "model_args": {"pretrained": model}},
        "git_hash": provenance.get("commit"),
        "transformers_version": provenance.get("transformers"),
        "model_source": "toolroll",
        "model_name": model,
        "model_name_sanitized": file_part(model, "__") or "unknown",
        "chat_template_sha": provenance.get("template_sha256"),
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
