"""Response bodies in OpenAI's format, with the exact token ids added: `prompt_token_ids`,
`choices[i].token_ids`, and each token's id in the logprobs. The logprobs include the stop token, so
that they align with `token_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from toolroll.rollout.runtime.jsonable import ids_json
from toolroll.rollout.server.answers.result import LONG, Choice, CompletionResult
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Completion, IdArray


def is_long(completions: Sequence[Completion], top: int | None) -> bool:
    """Return True if writing `completions` as JSON takes so long that it should run in a thread.
    Logprobs take long, because each entry requires decoding a token. `top`: the number of top
    logprobs at each position, or None if there are no logprobs.
    """
    tokens = sum(len(completion.output_ids) for completion in completions)
    return tokens * (1 if top is None else 10 * (1 + top)) > LONG


def prompt_token_ids(result: CompletionResult) -> dict[str, Any]:
    """Return the field `prompt_token_ids`."""
    return {"prompt_token_ids": orjson.Fragment(b"[" + ids_json(result.prompt_ids) + b"]")}


def constraint(result: CompletionResult) -> dict[str, Any]:
    """Return the field `constrained`, which names the request field that caused a grammar
    constraint. Return an empty dict if there was no constraint.
    """
    return {"constrained": result.constrained} if result.constrained else {}


def exact(choice: Choice) -> dict[str, Any]:
    """Return the sampled ids, the stop token or stop string, and the weight version."""
    completion = choice.completion
    return {
        "token_ids": completion.output_ids.tolist(),
        "stop_reason": completion.matched,
        "weight_version": completion.weight_version,
    }


def wire_message(choice: Choice) -> dict[str, Any]:
    """Return the assistant message for the client. It leaves out the prefill, if there is one."""
    assert choice.turn is not None
    return {**(choice.shown or choice.turn.message), "refusal": None}


def finish_reason(choice: Choice) -> str:
    """Return OpenAI's finish reason. A reply with tool calls has the reason `tool_calls` if it is
    complete, and `length` if it was truncated.
    """
    if (
        choice.completion.finish_reason == "stop"
        and choice.turn is not None
        and choice.turn.parsed.tool_calls
    ):
        return "tool_calls"
    return choice.completion.finish_reason


def chat_logprobs(completion: Completion, encoder: Encoder, top: int) -> dict[str, Any]:
    """Return the logprobs of a chat completion: `content` has one entry per sampled token."""
    assert completion.logprobs is not None
    entries = []
    for at, (index, value) in enumerate(
        zip(completion.output_ids.tolist(), completion.logprobs.tolist(), strict=True)
    ):
        likeliest = completion.top_logprobs[at][:top] if top and completion.top_logprobs else ()
        entries.append(
            {
                **_token(encoder, index, value),
                "top_logprobs": [_token(encoder, other, logprob) for logprob, other in likeliest],
            }
        )
    return {"content": entries, "refusal": None}


def _token(encoder: Encoder, index: int, logprob: float) -> dict[str, Any]:
    text = encoder.decode([index])
    whole = "\ufffd" not in text
    return {
        "token": text,
        "token_id": index,
        "logprob": logprob,
        "bytes": list(text.encode()) if whole else None,
    }


def text_logprobs(completion: Completion, encoder: Encoder, top: int) -> dict[str, Any]:
    """Return the logprobs of a text completion."""
    assert completion.logprobs is not None
    texts = [encoder.decode([index]) for index in completion.output_ids.tolist()]
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    places = completion.top_logprobs or [()] * len(texts)
    return {
        "tokens": texts,
        "token_logprobs": completion.logprobs.tolist(),
        "token_ids": completion.output_ids.tolist(),
        "text_offset": offsets[:-1],
        "top_logprobs": [
            {encoder.decode([other]): value for value, other in place[:top]} for place in places
        ]
        if top
        else None,
    }


# --- training data --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traced:
    """An answer and the `prompt_ids` from which it was sampled. `kind`: the name of its API.
    `excluded`: the reason why it is excluded from training, or None.
    """

    kind: str
    prompt_ids: IdArray
    completion: Completion
    excluded: str | None

    @property
    def body(self) -> dict[str, Any]:
        """Return the answer as JSON data."""
        logprobs = self.completion.logprobs
        return {
            "object": self.kind,
            "prompt_token_ids": self.prompt_ids.tolist(),
            "completion_token_ids": self.completion.output_ids.tolist(),
            "logprobs": logprobs.tolist() if logprobs is not None else None,
            "finish_reason": self.completion.finish_reason,
            "excluded": self.excluded,
        }
