"""A run with everything that an export must handle, and readers of what was written."""

import json
from pathlib import Path
from typing import Any

from support.results import episode, trajectory

from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.types import Message, StopReason

PROVENANCE = {
    "date": "2031-03-10T09:30:00+00:00",
    "toolroll": "0.1.0",
    "tokenizer_sha256": "8288",
    "benchmark": {"pond-data": "2"},
}


def a_call(name: str, arguments: str, call: str = "c1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call, "type": "function", "function": function}


CALLS: list[Message] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "."}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Where?",
        "tool_calls": [a_call("look", '{"at": 1}'), a_call("look", '{"at": ', "c2")],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "A pond."},
    {"role": "tool", "tool_call_id": "c2", "name": "look", "content": "Invalid JSON."},
    {"role": "tool", "tool_call_id": "c9", "name": "look", "content": "A late result."},
    {"role": "assistant", "content": "A pond."},
]
"""A conversation of two turns, as many as `trajectory` has."""
METRICS = {
    "turns": 2.0,
    "prompt_tokens": 13.0,
    "cached_tokens": 6.0,
    "completion_tokens": 6.0,
    "seconds": 1.5,
}


def varied() -> list[Episode]:
    """Calls, a fork, an episode that was cut short, and one that was aborted."""
    first, fork = trajectory(), trajectory(14, [(6, 9)], fork_reason="rewritten")
    gone = {"type": "EngineError", "message": "gone"}
    three = [*CALLS, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    return [
        episode("a/b", 0, 1.0, messages=CALLS, metrics=METRICS),
        episode("a/b", 1, 0.0, messages=three, metrics=METRICS, trajectories=[first, fork]),
        episode("t-1", 0, 0.5, messages=CALLS, metrics=METRICS, reason=StopReason.MAX_TURNS),
        episode("t-1", 1, 1.0, messages=CALLS, metrics=METRICS),
        episode("t-2", 0, reason=StopReason.ENGINE_ERROR, info={"error": gone}),
    ]


def write_run(folder: Path, episodes: list[Episode], env: str = "pond") -> Path:
    settings = {"agent": "tool-calling", "model": "tiny"}
    with RunDirectory(folder, env, settings, provenance=PROVENANCE) as run:
        for one in episodes:
            run.append(one)
    return folder


def trajectory_of(folder: Path, task: str, sample: int, env: str) -> dict[str, Any]:
    path = folder / env / f"{task}__{sample}" / "agent" / "trajectory.json"
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def sampled_steps(atif: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps with tokens, of the trajectory and of those in it."""
    parts = [atif, *(atif["subagent_trajectories"] or ())]
    return [step for part in parts for step in part["steps"] if "metrics" in step]


def own_turns(line: dict[str, Any]) -> list[tuple[list[int], list[int], list[float]]]:
    """The prompt, the sampled ids and the logprobs of each turn of a line of `episodes.jsonl`."""
    return [
        (ids[:start], ids[start:stop], part["logprobs"][start:stop])
        for part in line["trajectories"]
        for ids in [part["input_ids"]]
        for turn in part["turns"]
        for start, stop in [(turn["start"], turn["stop"])]
        if turn["excluded"] != "context"
    ]


def tokens_of(atif: dict[str, Any]) -> list[tuple[list[int], list[int], list[float]]]:
    """The same of the steps of an ATIF file."""
    found = [step["metrics"] for step in sampled_steps(atif)]
    return [(it["prompt_token_ids"], it["completion_token_ids"], it["logprobs"]) for it in found]
