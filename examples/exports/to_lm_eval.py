"""Write a run as `results_*.json` and `samples_*.jsonl`, as lm-evaluation-harness does:

    python examples/exports/to_lm_eval.py out/base out/lm-eval

An environment is a task of lm-eval (`a-b` for `a/b`), and a task is a document. The samples of a
task are the repeats of its document, and its metrics are means over them. Aborted episodes are left
out. A document has the task's id and hash, because the record does not have its data.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import orjson

from toolroll import Episode, UsageError
from toolroll.evaluation.export.exported_run import ExportedRun, is_graded
from toolroll.rollout.runs.pass_at_k import pass_hat_k
from toolroll.rollout.runtime.disk import new_folder
from toolroll.rollout.runtime.jsonable import json_bytes

Documents = Sequence[dict[str, Any]]
"""The lines of one `samples_*.jsonl`."""


def write_lm_eval(run: ExportedRun, folder: Path) -> list[str]:
    """Write `MODEL/results_DATE.json`, and `MODEL/samples_ENV_DATE.jsonl` for each environment with
    a graded episode, into the new `folder`. Return the environments that have no pass^k, because
    their tasks have different numbers of graded samples.

    Raise `UsageError` if the graded episodes are not those of one model.
    """
    models: set[str] = set()
    by_env = {env: _documents(run.episodes(env), models) for env in run.tasks}
    by_env = {env: documents for env, documents in by_env.items() if documents}
    if len(models) != 1:
        names = ", ".join(sorted(models)) or "none"
        raise UsageError(f"lm-eval's results are those of one model; {run.folder} has {names}")
    [model] = models
    started = min(datetime.fromisoformat(run.provenance(env)["date"]) for env in by_env)
    date = f"{started:%Y-%m-%dT%H-%M-%S.%f}"
    results: dict[str, Any] = {
        "config": {"model": "toolroll", "model_args": {"pretrained": model}},
        "date": started.timestamp(),
        "model_name": model,
        "model_name_sanitized": _file_part(model, "__") or "unknown",
    }
    with new_folder(folder):
        inside = folder / results["model_name_sanitized"]
        inside.mkdir()
        for env, documents in by_env.items():
            with (inside / f"samples_{_file_part(env)}_{date}.jsonl").open("xb") as file:
                for document in documents:
                    file.write(json_bytes(document, option=orjson.OPT_APPEND_NEWLINE))
            for name, part in _of_environment(run, env, documents).items():
                results.setdefault(name, {})[_file_part(env)] = part
        text = json_bytes(results, option=orjson.OPT_INDENT_2)
        (inside / f"results_{date}.json").write_bytes(text)
    return [env for env, documents in by_env.items() if "pass^1" not in documents[0]]


def _file_part(name: str, between: str = "-") -> str:
    """Return `name` as a part of a file's name: `between` replaces other characters than letters,
    digits, `.`, `-` and `_`.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", between, name)


def _documents(episodes: Iterable[Episode], models: set[str]) -> Documents:
    """Return the documents of an environment, in the order of its tasks. Add the models of its
    graded episodes to `models`.
    """
    by_task: dict[tuple[int, str], dict[str, Any]] = {}
    samples: dict[tuple[int, str], list[tuple[int, float | None, str]]] = defaultdict(list)
    for episode in episodes:
        if is_graded(episode):
            models.add(episode.model)
            task = episode.task_index, episode.task_id
            by_task.setdefault(task, _document(episode))
            result = episode.result
            samples[task].append((episode.sample, result.reward, result.response))
    counts = {len(of_task) for of_task in samples.values()}
    for task, document in by_task.items():
        _, rewards, responses = zip(*sorted(samples[task]), strict=True)
        metrics = {"reward": sum(rewards) / len(rewards)}
        if len(counts) == 1:
            metrics |= {f"pass^{k}": pass_hat_k([rewards], k) for k in range(1, len(rewards) + 1)}
        document |= {"resps": [responses], "filtered_resps": [responses], "rewards": rewards}
        document |= {"metrics": list(metrics), **metrics}
    return [by_task[task] for task in sorted(by_task)]


def _document(episode: Episode) -> dict[str, Any]:
    turns = [turn for part in episode.result.trajectories for turn in part.turns]
    params = dict(turns[0].sampling_params) if turns else {}
    prompt = episode.result.prompt
    document = {"task_id": episode.task_id, "task_hash": episode.task_hash}
    hashed = {"doc": json_bytes(document), "prompt": prompt.encode(), "target": b""}
    return {
        "doc_id": episode.task_index,
        "doc": document,
        "target": "",
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": params}},
        "filter": "none",
        **{f"{name}_hash": hashlib.sha256(text).hexdigest() for name, text in hashed.items()},
    }


def _of_environment(run: ExportedRun, env: str, documents: Documents) -> dict[str, Any]:
    """Return the parts of `results_*.json` for `env`, by name."""
    names = documents[0]["metrics"]
    metrics: dict[str, Any] = {"alias": env, "sample_len": len(documents)}
    for name in names:
        means = [document[name] for document in documents]
        error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else "N/A"
        metrics |= {f"{name},none": fmean(means), f"{name}_stderr,none": error}
    versions = run.provenance(env).get("benchmark") or {}
    return {
        "results": metrics,
        "configs": {"task": _file_part(env), "metadata": run.settings(env)},
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or None,
        "n-shot": 0,
        "higher_is_better": dict.fromkeys(names, True),
        "n-samples": {"original": len(run.tasks[env]), "effective": len(documents)},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the run that the `arguments` of the command line name."""
    parser = argparse.ArgumentParser(description="Write a run as results of lm-eval.")
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--env", help="export only this environment")
    given = parser.parse_args(arguments)
    run = ExportedRun(given.run, given.env)
    why = "no pass^k, because its tasks have different numbers of graded samples"
    unequal = [f"{env}: {why}" for env in write_lm_eval(run, given.out)]
    print(*run.bad_lines, *unequal, f"{given.out}: results and samples", sep="\n")


if __name__ == "__main__":
    main()
