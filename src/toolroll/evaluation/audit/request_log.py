"""`read_record`: reads an `EngineRecord` from SGLang's request log or from a folder of toolroll."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from toolroll.evaluation.audit.record import EngineRecord
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import FILE_NAME, read_episodes

FLAGS = "--log-requests --log-requests-level 3 --log-requests-format json --log-requests-target DIR"
Encode = Callable[[str], list[int]]


def read_record(path: str | Path, encode: Encode | None = None) -> EngineRecord:
    """Return the record in `path`: SGLang's log (a folder or a file), or the folder of a run or of
    `toolroll serve --out`.

    `encode` returns the ids of a prompt that was sent as text, as the engine encodes it. Raise
    `UsageError` if a line lacks ids, or if no answer is found.
    """
    record, path = EngineRecord(), Path(path)
    if not path.exists():
        raise UsageError(f"--requests: there is no {path}")
    if (path / FILE_NAME).is_file():
        for episode in read_episodes(path):
            for part in episode.result.trajectories:
                for turn in part.turns:
                    if turn.excluded != "context":
                        span = slice(turn.start, turn.stop)
                        prompt_ids = part.input_ids[: turn.start]
                        record.add(prompt_ids, part.input_ids[span], part.logprobs[span])
    else:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in filter(Path.is_file, files):
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if b'"event": "request.finished"' in line and line.endswith(b"\n"):
                        _add(record, line, f"{file}, line {number}", encode)
    if not record.answers:
        raise UsageError(f"{path} has no answers with ids. SGLang writes them with {FLAGS}")
    return record


def _add(record: EngineRecord, line: bytes, place: str, encode: Encode | None) -> None:
    try:
        data: dict[str, Any] = orjson.loads(line[line.index(b"{") :])
        request, out, meta = data["obj"], data["out"], data["out"]["meta_info"]
        if data["rid"].startswith("HEALTH_CHECK"):  # SGLang's own
            return
        prompt_ids, output_ids = request["input_ids"], np.array(out["output_ids"], np.int32)
        if prompt_ids is None:
            prompt_ids = [] if encode is None else encode(request["text"])
            if len(prompt_ids) != meta["prompt_tokens"]:
                record.without_ids += 1
                return
        if len(output_ids) != meta["completion_tokens"]:
            raise ValueError("a part of the output_ids is missing")
        pairs = meta.get("output_token_logprobs")
        logprobs = None if pairs is None else np.array([pair[0] for pair in pairs], np.float32)
        record.add(np.array(prompt_ids, np.int32), output_ids, logprobs)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{place} has no complete ids ({error!r}). Start SGLang with {FLAGS}, and without "
            "--incremental-streaming-output"
        ) from error
