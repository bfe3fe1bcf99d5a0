"""`write_atif`: writes each episode as Harbor's `trajectory.json` (ATIF 1.7).

Invariants:

- `prompt_token_ids` and `completion_token_ids` are the ids that were sent to the engine and sampled
  by it. Each sampled turn is in one step, so a fork repeats no turn.
- A step has tokens and text only if the record proves that they belong together (`_turns_of`).
  The other turns become steps without text in `subagent_trajectories`, one trajectory a sequence.
- Every number is finite. Aborted episodes are left out, and so are the tokens of transcripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.export.messages import calls_of, text_of
from toolroll.rollout.runs.export.recorded_run import RecordedRun, label, new_folder
from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.types import Episode, InteractionResult, Message, Status, Trajectory, Turn

VERSION = "ATIF-v1.7"
_NO_TEXT = "The tokens of this sequence are recorded, but not which messages they are."

Sampled = tuple[Trajectory, Turn]
"""A turn, and the sequence that contains it."""


def write_atif(run: RecordedRun, folder: Path) -> tuple[int, int]:
    """Write `ENV/TASK__SAMPLE/agent/trajectory.json` into the new `folder` for each episode. Return
    the number of files, and the number of episodes that are left out.

    Raise `UsageError` if a sampled token that is trained has no logprob, or if a logprob is not
    finite.
    """
    written = left_out = 0
    with new_folder(folder):
        for episode in run.episodes():
            agent = {
                "name": str(run.settings(episode.env).get("agent") or "toolroll"),
                "version": str(run.provenance(episode.env).get("toolroll") or "unknown"),
                "model_name": episode.model or "unknown",
            }
            trajectory = atif_trajectory(episode, agent)
            if trajectory is None:
                left_out += 1
            else:
                name = f"{quote(episode.task_id, safe='')}__{episode.sample}"
                trial = folder / quote(episode.env, safe="") / name / "agent"
                trial.mkdir(parents=True)
                text = json_bytes(trajectory, option=orjson.OPT_INDENT_2)
                (trial / "trajectory.json").write_bytes(text)
                written += 1
    return written, left_out


def atif_trajectory(episode: Episode, agent: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `episode` as a trajectory of ATIF, or None if it was aborted or has no step.

    `agent`: its name, version and model_name. Token ids and logprobs are numpy arrays.
    """
    result = episode.result
    if result.status is Status.ABORTED:
        return None
    parts = [part for part in result.trajectories if part.source == "engine"]
    try:
        turns = _turns_of(result, parts)
        steps = _message_steps(result.messages, turns or ())
        written = {id(turn) for _, turn in turns or ()}
        others = [[pair for pair in _own(part) if id(pair[1]) not in written] for part in parts]
        if not steps:  # text completions: no messages are recorded
            steps = _token_steps([pair for pairs in others for pair in pairs])
            others = []
    except ValueError as error:
        raise UsageError(f"{label(episode)}: {error}") from error
    if not steps:
        return None
    embedded = [_sequence(number, pairs, agent) for number, pairs in enumerate(others, 1) if pairs]
    name = f"{episode.env}/{episode.task_id}/{episode.sample}"
    return {
        "schema_version": VERSION,
        "session_id": name,
        "trajectory_id": name,
        "agent": {**agent, "tool_definitions": result.tools},
        "steps": steps,
        "final_metrics": _totals(result) | {"total_steps": len(steps)},
        "extra": _facts(episode),
    } | ({"subagent_trajectories": embedded} if embedded else {})


def _facts(episode: Episode) -> dict[str, Any]:
    result = episode.result
    return {
        "env": episode.env,
        "task_id": episode.task_id,
        "task_hash": episode.task_hash,
        "sample": episode.sample,
        "seed": episode.seed,
        "reward": result.reward,
        "status": result.status.value,
        "stop_reason": str(result.stop_reason),
        "info": result.info,
    }


def _totals(result: InteractionResult) -> dict[str, int]:
    kinds = ("prompt", "completion", "cached")
    return {
        f"total_{kind}_tokens": int(result.metrics[f"{kind}_tokens"])
        for kind in kinds
        if f"{kind}_tokens" in result.metrics
    }


# --- which turn is which message ------------------------------------------------------------------


def _turns_of(result: InteractionResult, parts: Sequence[Trajectory]) -> list[Sampled] | None:
    """Return the turn of each assistant message in order, or None if the record does not tell.

    toolroll's loop plays one conversation, and adds one message for each turn that it samples. A
    session of the endpoint (its `prompt` is empty) may have several conversations. Its messages are
    those of the last sequence, unless it has text completions. In both cases, equal numbers of
    turns and assistant messages leave no room for a message that somebody else wrote.
    """
    if result.prompt:
        turns = [pair for part in parts for pair in _own(part)]
    elif parts and not result.metrics.get("text_completions"):
        turns = [(parts[-1], turn) for turn in parts[-1].turns]
    else:
        return None
    said = sum(message.get("role") == "assistant" for message in result.messages)
    return turns if len(turns) == said else None


def _own(part: Trajectory) -> list[Sampled]:
    """Return the turns of `part` that no earlier sequence contains."""
    return [(part, turn) for turn in part.turns if turn.excluded != "context"]


# --- steps ----------------------------------------------------------------------------------------


def _message_steps(messages: Sequence[Message], turns: Sequence[Sampled]) -> list[dict[str, Any]]:
    """Return one step for each message, except that the results of tools belong to the step of
    their calls. `turns`: the turn of each assistant message, or nothing.
    """
    steps: list[dict[str, Any]] = []
    left = iter(turns)
    for message in messages:
        if message.get("role") == "tool":
            _observe(steps, message)
        else:
            steps.append({"step_id": len(steps) + 1, **_step(message, left)})
    return steps


def _step(message: Message, turns: Iterator[Sampled]) -> dict[str, Any]:
    text = text_of(message.get("content"))
    if message.get("role") != "assistant":
        return {"source": "user" if message.get("role") == "user" else "system", "message": text}
    step = {"source": "agent", "message": text, **_sampled(next(turns, None))}
    if message.get("reasoning_content"):
        step["reasoning_content"] = str(message["reasoning_content"])
    calls = [
        {"tool_call_id": call.id, "function_name": call.name, "arguments": call.arguments or {}}
        | ({"extra": {"unreadable_arguments": call.text}} if call.arguments is None else {})
        for call in calls_of(message)
    ]
    return step | ({"tool_calls": calls} if calls else {})


def _observe(steps: list[dict[str, Any]], message: Message) -> None:
    """Add the result of a tool to the last step of the agent, if this step called it. Otherwise
    add it to the last step, without the id of a call.
    """
    if not steps:
        steps.append({"step_id": 1, "source": "system", "message": ""})
    call = message.get("tool_call_id")
    agents = [step for step in steps if step["source"] == "agent"]
    called = agents and call in [made["tool_call_id"] for made in agents[-1].get("tool_calls", ())]
    observed = {"content": text_of(message.get("content"))}
    step = agents[-1] if called else steps[-1]
    results = step.setdefault("observation", {"results": []})["results"]
    results.append({"source_call_id": call, **observed} if called else observed)


def _sequence(number: int, turns: list[Sampled], agent: Mapping[str, Any]) -> dict[str, Any]:
    """Return `turns` of the sequence with this number as a trajectory that a parent can embed."""
    part = turns[0][0]
    return {
        "schema_version": VERSION,
        "trajectory_id": f"sequence-{number}",
        "agent": {**agent, "name": part.lineage.get("agent_name", agent["name"])},
        "steps": _token_steps(turns),
        "notes": _NO_TEXT,
        "extra": {"fork_reason": part.fork_reason, "lineage": dict(part.lineage)},
    }


def _token_steps(turns: Sequence[Sampled]) -> list[dict[str, Any]]:
    return [
        {"step_id": number, "source": "agent", "message": "", **_sampled(pair)}
        for number, pair in enumerate(turns, 1)
    ]


def _sampled(pair: Sampled | None) -> dict[str, Any]:
    """Return the fields of a step that say how it was sampled. A turn of an earlier sequence is
    copied context, and its tokens are in the trajectory of that sequence.
    """
    if pair is None:
        return {}
    part, turn = pair
    if turn.excluded == "context":
        return {"is_copied_context": True}
    logprobs = _logprobs(part, turn)
    return {
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": turn.start,
            "completion_tokens": turn.length,
            "cached_tokens": turn.cached_tokens,
            "prompt_token_ids": part.input_ids[: turn.start],
            "completion_token_ids": part.input_ids[turn.start : turn.stop],
            **({} if logprobs is None else {"logprobs": logprobs}),
            "extra": _turn_facts(part, turn),
        },
    }


def _turn_facts(part: Trajectory, turn: Turn) -> dict[str, Any]:
    """Return what ATIF has no field for. Positions count from the first sampled token."""
    mask = part.loss_mask[turn.start : turn.stop]
    return {
        "finish_reason": turn.finish_reason,
        "sampling_params": dict(turn.sampling_params),
        "weight_versions": [
            [span.version, span.start - turn.start, span.stop - turn.start]
            for span in turn.weight_versions
        ],
        "reward": turn.reward,
        "excluded": turn.excluded,
    } | ({} if mask.all() else {"loss_mask": mask})


def _logprobs(part: Trajectory, turn: Turn) -> Any:
    """Return the logprobs of `turn`, or None if none were requested. Raise `ValueError` if some are
    missing or infinite, or if they are missing for a trained token.
    """
    logprobs = part.logprobs[turn.start : turn.stop]
    if np.isnan(logprobs).all() and not part.loss_mask[turn.start : turn.stop].any():
        return None
    wrong = np.flatnonzero(~np.isfinite(logprobs))
    if len(wrong):
        raise ValueError(
            f"{len(wrong)} of {turn.length} sampled tokens have no finite logprob, the first at "
            f"position {turn.start + wrong[0]} of its sequence"
        )
    return logprobs
