"""`write_atif`: writes each episode as Harbor's `trajectory.json` (ATIF 1.7).

Invariants:

- `prompt_token_ids` and `completion_token_ids` are the ids that were sent to the engine and sampled
  by it. Each sampled turn is in one step, so a fork repeats no turn.
- A step has tokens and text only if the record proves that they belong together (`_turns_of`).
  The other turns become steps without text in `subagent_trajectories`, one trajectory a sequence.
- Every number is finite. Aborted episodes are left out, and so are the tokens of transcripts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from toolroll.evaluation.export.exported_run import ExportedRun
from toolroll.evaluation.export.messages import calls_of, text_of
from toolroll.rollout.episode import Episode, InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.disk import new_folder
from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.types import Message, Status, Trajectory, Turn

VERSION = {"schema_version": "ATIF-v1.7"}
_LONGEST = 200
_OF_EPISODE = "env task_id task_hash sample seed".split()
_OF_RESULT = "reward status stop_reason info".split()
_OF_TURN = "finish_reason sampling_params weight_versions reward excluded".split()

Step = dict[str, Any]
PlacedTurn = tuple[Trajectory, Turn]
"""A turn, and the sequence that contains it."""


def write_atif(run: ExportedRun, folder: Path) -> int:
    """Write `ENV/TASK__SAMPLE/agent/trajectory.json` into the new `folder` for each episode that
    was not aborted. Return the number of files.

    Raise `UsageError` if a sampled token that is trained has no finite logprob.
    """
    count = 0
    with new_folder(folder):
        for episode in run.episodes():
            agent = {
                "name": str(run.settings(episode.env).get("agent") or "toolroll"),
                "version": str(run.provenance(episode.env).get("toolroll") or "unknown"),
                "model_name": episode.model or "unknown",
            }
            if trajectory := atif_trajectory(episode, agent):
                name = f"{_name(episode.task_id)}__{episode.sample}"
                trial = folder / _name(episode.env) / name / "agent"
                trial.mkdir(parents=True)
                (trial / "trajectory.json").write_bytes(json_bytes(trajectory))
                count += 1
    return count


def _name(text: str) -> str:
    """Return `text` as the name of one folder: not `..`, and not too long for file systems."""
    name = quote(text, safe="")
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    return name if name.strip(".") else name.replace(".", "%2E")


def atif_trajectory(episode: Episode, agent: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `episode` as a trajectory of ATIF, or None if it was aborted or has no step.

    `agent`: its name, version and model_name. Token ids and logprobs are numpy arrays.
    """
    result = episode.result
    if result.status is Status.ABORTED:
        return None
    name = f"{episode.env}/{episode.task_id}/{episode.sample}"
    parts = [part for part in result.trajectories if part.source == "engine"]
    turns = _turns_of(result, parts)
    written = {id(turn) for _, turn in turns}
    unused = [[pair for pair in _own(part) if id(pair[1]) not in written] for part in parts]
    try:
        steps = _message_steps(result.messages, turns)
        if not steps:  # text completions: no messages are recorded
            steps, unused = _token_steps([pair for pairs in unused for pair in pairs]), []
        embedded = [_sequence(number, pairs, agent) for number, pairs in enumerate(unused) if pairs]
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error
    if not steps:
        return None
    return {
        **VERSION,
        "session_id": name,
        "trajectory_id": name,
        "agent": {**agent, "tool_definitions": result.tools},
        "steps": steps,
        "extra": {field: getattr(episode, field) for field in _OF_EPISODE}
        | {field: getattr(result, field) for field in _OF_RESULT},
        "subagent_trajectories": embedded or None,
    }


# --- which turn is which message ------------------------------------------------------------------


def _turns_of(result: InteractionResult, parts: Sequence[Trajectory]) -> list[PlacedTurn]:
    """Return the turn of each assistant message in order, or [] if the record does not tell.

    toolroll's loop plays one conversation, and adds one message for each turn that it samples. A
    session of the endpoint (its `prompt` is empty) may have several conversations. Its messages are
    those of the last sequence, unless it has text completions. In both cases, equal numbers of
    turns and assistant messages leave no room for a message that somebody else wrote.
    """
    turns: list[PlacedTurn] = []
    if result.prompt:
        turns = [pair for part in parts for pair in _own(part)]
    elif parts and not result.metrics.get("text_completions"):
        turns = [(parts[-1], turn) for turn in parts[-1].turns]
    replies = sum(message.get("role") == "assistant" for message in result.messages)
    return turns if len(turns) == replies else []


def _own(part: Trajectory) -> list[PlacedTurn]:
    """Return the turns of `part` that no earlier sequence contains."""
    return [(part, turn) for turn in part.turns if turn.excluded != "context"]


# --- steps ----------------------------------------------------------------------------------------


def _message_steps(messages: Sequence[Message], turns: Sequence[PlacedTurn]) -> list[Step]:
    """Return one step for each message, except that the results of tools belong to the step of
    their calls. `turns`: the turn of each assistant message, or nothing.
    """
    steps: list[Step] = []
    remaining = iter(turns)
    for message in messages:
        if message.get("role") == "tool" and steps:
            _observe(steps, message)
        else:
            steps.append({"step_id": len(steps) + 1, **_step(message, remaining)})
    return steps


def _step(message: Message, turns: Iterator[PlacedTurn]) -> Step:
    text = text_of(message.get("content"))
    if message.get("role") != "assistant":
        return {"source": "user" if message.get("role") == "user" else "system", "message": text}
    calls = [
        {"tool_call_id": call.id, "function_name": call.function, "arguments": call.arguments}
        | {"extra": {"parse_error": call.parse_error}}
        for call in calls_of(message)
    ]
    return {
        "source": "agent",
        "message": text,
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": calls or None,
        **_sampled(next(turns, None)),
    }


def _observe(steps: list[Step], message: Message) -> None:
    """Add the result of a tool to the last step of the agent, if this step called it. Otherwise
    add it to the last step, without the id of a call.
    """
    call = message.get("tool_call_id")
    last = next((step for step in reversed(steps) if step["source"] == "agent"), steps[-1])
    called = call in [entry["tool_call_id"] for entry in last.get("tool_calls") or ()]
    step = last if called else steps[-1]
    step.setdefault("observation", {"results": []})["results"].append(
        {"source_call_id": call if called else None, "content": text_of(message.get("content"))}
    )


def _sequence(number: int, turns: list[PlacedTurn], agent: Mapping[str, Any]) -> dict[str, Any]:
    """Return `turns` of the sequence with this number as a trajectory that a parent can embed."""
    part = turns[0][0]
    return {
        **VERSION,
        "trajectory_id": f"sequence-{number}",
        "agent": {**agent, "name": part.lineage.get("agent_name", agent["name"])},
        "steps": _token_steps(turns),
        "notes": "The record does not say which messages these turns are.",
        "extra": {"fork_reason": part.fork_reason, "lineage": dict(part.lineage)},
    }


def _token_steps(turns: Sequence[PlacedTurn]) -> list[Step]:
    return [
        {"step_id": number, "source": "agent", "message": "", **_sampled(pair)}
        for number, pair in enumerate(turns, 1)
    ]


def _sampled(pair: PlacedTurn | None) -> Step:
    """Return the fields of a step that say how it was sampled. A turn of an earlier sequence is
    copied context, and its tokens are in the trajectory of that sequence. Positions in
    `weight_versions` count from the start of the prompt.
    """
    if pair is None:
        return {}
    part, turn = pair
    if turn.excluded == "context":
        return {"is_copied_context": True}
    mask = part.loss_mask[turn.start : turn.stop]
    metrics = {
        "prompt_tokens": turn.start,
        "completion_tokens": turn.length,
        "cached_tokens": turn.cached_tokens,
        "prompt_token_ids": part.input_ids[: turn.start],
        "completion_token_ids": part.input_ids[turn.start : turn.stop],
        "logprobs": _logprobs(part, turn),
        "extra": {field: getattr(turn, field) for field in _OF_TURN} | {"loss_mask": mask},
    }
    return {"llm_call_count": 1, "metrics": metrics}


def _logprobs(part: Trajectory, turn: Turn) -> Any:
    """Return the logprobs of `turn`, or None if none were requested. Raise `ValueError` if some are
    missing or infinite, or if they are missing for a trained token.
    """
    logprobs = part.logprobs[turn.start : turn.stop]
    wrong = int((~np.isfinite(logprobs)).sum())
    if np.isnan(logprobs).all() and not part.loss_mask[turn.start : turn.stop].any():
        return None
    if wrong:
        raise ValueError(f"{wrong} of {turn.length} sampled tokens have no finite logprob")
    return logprobs
