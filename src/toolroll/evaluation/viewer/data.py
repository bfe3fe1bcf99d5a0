"""The data of the page.

`view.html` contains JSON in blocks `<script type="text/plain" id=ID>`. Each block is deflated and
base64-encoded:

- `index`: `title`; `rows`, which has the result of `row` for each episode; `settings` (`run.json`
  by environment) of each run; and `summary` (`summary.json`) by environment. `run` in a row is the
  number of its run. A comparison also has `runs` (their names) and `texts` (the results), and
  `base` in a row is the baseline's sample with which it is paired, or null.
- `block-N`: a list of results of `conversation`. In a row, `block` is the N of its block, and
  `place` is its index in the list.
- `tools-N`: a list of tools in OpenAI's format. In a conversation, `tools` is the N of its list.
- `tokens-I`: the result of `sequences` for the episode in row I. It exists if the row's `hasTokens`
  is true.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from toolroll.evaluation.export.messages import mappings
from toolroll.evaluation.reward_reason import reward_reason
from toolroll.rollout.episode import Episode, InteractionResult
from toolroll.rollout.runs.pass_at_k import passed
from toolroll.rollout.runs.summary import as_count
from toolroll.rollout.types import MaskArray, Status, StopReason, Trajectory, Turn


def row(episode: Episode) -> dict[str, Any]:
    """Return the data for a table row, including the fields for filters."""
    result = episode.result
    metrics = result.metrics
    aborted = result.status is Status.ABORTED  # then no trainer gets its tokens
    solved = result.reward is not None and passed(result.reward)
    early = (
        "" if solved or result.stop_reason is StopReason.DONE else f"ended by {result.stop_reason}"
    )
    return {
        "env": episode.env,
        "task": episode.task_id,
        "sample": episode.sample,
        "seed": episode.seed,
        "status": result.status.value,
        "stop": str(result.stop_reason),
        "reward": result.reward,
        "passed": solved,
        "reason": reward_reason(result.info) or early,
        "turns": as_count(metrics.get("turns", 0)),
        "tokens": sum(len(part) for part in result.trajectories)
        or as_count(metrics.get("completion_tokens", 0)),
        "trained": 0 if aborted else sum(part.trained_tokens for part in result.trajectories),
        "calls": as_count(metrics.get("tool_calls", 0)),
        "invalid": as_count(metrics.get("invalid_calls", 0)),
        "toolErrors": as_count(metrics.get("tool_errors", 0)),
        "lookalike": as_count(metrics.get("lookalike_calls", 0)),
        "forks": max(len(result.trajectories) - 1, 0),
        "seconds": round(metrics.get("seconds", 0.0), 3),
        "called": called_tools(result.messages),
    }


def conversation(episode: Episode, tools: int) -> dict[str, Any]:
    """Return the data for an episode's view, without its tokens.

    `tools`: the N of the block `tools-N` that has the episode's tools. In the result, `invalid` has
    `[message, call, status]` for each invalid call.
    """
    result = episode.result
    bad_calls = result.info.get("bad_calls")
    return {
        "messages": result.messages,
        "invalid": [
            [bad.get("message"), bad.get("call"), bad.get("status")] for bad in mappings(bad_calls)
        ],
        "tools": tools,
        "info": result.info,
        "metrics": result.metrics,
        "stepRewards": list(result.step_rewards),
        "expected": episode.expected_calls,
    }


def called_tools(messages: list[dict[str, Any]]) -> list[str]:
    """Return the names of the tools that were called, sorted."""
    calls = [call for message in messages for call in mappings(message.get("tool_calls"))]
    functions = [function for call in calls for function in mappings([call.get("function")])]
    return sorted({str(function.get("name") or "unknown") for function in functions})


def sequences(result: InteractionResult, pieces: Pieces | None) -> list[dict[str, Any]]:
    """Return the data of the training sequences, whose masks are 0 if the episode was aborted.
    Without `pieces`, a token's text is its id.
    """
    trained = result.status is not Status.ABORTED
    return [_sequence(part, part.loss_mask * trained, pieces) for part in result.trajectories]


def _sequence(part: Trajectory, mask: MaskArray, pieces: Pieces | None) -> dict[str, Any]:
    ids = part.input_ids.tolist()
    return {
        "ids": ids,
        "texts": pieces.of(ids) if pieces is not None else [f"{index} " for index in ids],
        "mask": "".join("1" if bit else "0" for bit in mask.tolist()),
        "logprobs": [
            None if math.isnan(value) else round(value, 4) for value in part.logprobs.tolist()
        ],
        "promptLength": part.prompt_length,
        "source": part.source,
        "forkReason": part.fork_reason,
        "turns": [_turn(turn) for turn in part.turns],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "start": turn.start,
        "stop": turn.stop,
        "finish": turn.finish_reason,
        "excluded": turn.excluded,
        "versions": [[span.version, span.start, span.stop] for span in turn.weight_versions],
        "params": dict(turn.sampling_params),
        "prompt": turn.prompt_tokens,
        "cached": turn.cached_tokens,
        "latency": round(turn.latency, 4),
    }


# --- the text of each token -----------------------------------------------------------------------

_BROKEN = "\ufffd"
_MOST_TOKENS = 8  # maximum tokens of one character: 4 bytes in UTF-8, and joined emoji


class Pieces:
    """The text of each token of a sequence, its piece. Each id is decoded once.

    Invariant: the joined pieces of a sequence are its text. If a character consists of several
    tokens, the piece of the last of these tokens is the whole character, and the pieces of the
    others are empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the piece of each token in `ids`."""
        pieces: list[str] = []
        waiting: list[int] = []
        for index in ids:
            alone = self._alone(int(index))
            if not waiting and _BROKEN not in alone:
                pieces.append(alone)
                continue
            waiting.append(int(index))
            text = self._decode(waiting)
            if _BROKEN in text and len(waiting) < _MOST_TOKENS:
                pieces.append("")
                continue
            pieces.append(text)
            waiting.clear()
        if waiting:
            pieces[-1] = self._decode(waiting)
        return pieces

    def _alone(self, index: int) -> str:
        if index not in self._known:
            text = self._decode([index])
            token = self._tokenizer.convert_ids_to_tokens(index)
            if isinstance(token, str) and token.startswith("▁") and not text.startswith(" "):
                text = " " + text  # SentencePiece drops the space of a first word
            self._known[index] = text
        return self._known[index]

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
