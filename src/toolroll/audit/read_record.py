"""`read_record`: reads an `EngineRecord` from SGLang's request log or from a folder of toolroll."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from toolroll.audit.record import EngineRecord
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import FILE_NAME, read_episodes
from toolroll.rollout.types import Trajectory

FLAGS = "--log-requests --log-requests-level 3 --log-requests-format json --log-requests-target DIR"
_FINISHED = b'"event": "request.finished"'
Encode = Callable[[str], list[int]]


def read_record(path: Path, encode: Encode | None = None) -> EngineRecord:
    """Return the record in `path`: SGLang's log (a folder or a file), or the folder of a run or of
    `toolroll serve --out`.

    `encode` returns the ids of a prompt that was sent as text, as the engine encodes it. Raise
    `UsageError` if a line lacks ids, or if nothing is found.
    """
    record = EngineRecord()
    if (path / FILE_NAME).is_file():
        for episode in read_episodes(path):
            for trajectory in episode.result.trajectories:
                _add_turns(record, trajectory)
    else:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in files:
            if file.is_file():
                for place, line in _finished(file):
                    _add_request(record, line, place, encode)
    if not record.answers:
        raise UsageError(f"--requests {path} has no sampled tokens. SGLang writes them with {FLAGS}")
    return record


def _add_turns(record: EngineRecord, part: Trajectory) -> None:
    for turn in part.turns:
        if turn.excluded != "context":
            span = slice(turn.start, turn.stop)
            record.add(part.input_ids[: turn.start], part.input_ids[span], part.logprobs[span])


def _finished(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the log's finished requests, each with its place. Other lines are skipped, and so is an
    incomplete last line.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if _FINISHED in line and line.endswith(b"\n"):
                place = f"{file}, line {number}"
                try:
                    yield place, orjson.loads(line[line.index(b"{") :])
                except ValueError as error:
                    raise UsageError(f"{place}: {error}") from error


def _add_request(
    record: EngineRecord, line: dict[str, Any], place: str, encode: Encode | None
) -> None:
    request, out = line["obj"], line["out"]
    if str(line.get("rid")).startswith("HEALTH_CHECK"):  # SGLang's own
        return
    meta, output = out.get("meta_info", {}), out.get("output_ids")
    if output is None or "sampling_params" not in request:
        raise UsageError(f"{place} has no output_ids. SGLang writes them with {FLAGS}")
    if len(output) != meta.get("completion_tokens", len(output)):
        raise UsageError(
            f"{place} has only the last {len(output)} of {meta['completion_tokens']} output_ids: "
            "start SGLang without --incremental-streaming-output"
        )
    prompt = request.get("input_ids")
    if prompt is None and encode is not None and isinstance(request.get("text"), str):
        prompt = encode(request["text"])
        prompt = prompt if len(prompt) == meta.get("prompt_tokens", len(prompt)) else None
    if prompt is None:
        record.without_ids += 1
        return
    found = meta.get("output_token_logprobs")
    logprobs = None if found is None else np.array([item[0] for item in found], np.float32)
    try:
        record.add(np.array(prompt, np.int32), np.array(output, np.int32), logprobs)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{place} has no lists of ids. SGLang writes them with {FLAGS}") from error
