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


def chat_body(
    served: CompletionResult,
    encoder: Encoder,
    *,
    logprobs: bool,
    top: int,
    token_ids: bool,
) -> dict[str, Any]:
    """Return a `chat.completion` without the field `prompt_token_ids`, which
    `CompletionResult.body` adds. `top`: the number of top logprobs at each position. `token_ids`:
    add the top-level field `token_ids` for OpenRLHF.
    """
    choices = [
        {
            "index": index,
            "message": wire_message(choice),
            "finish_reason": finish_reason(choice),
            "logprobs": chat_logprobs(choice.completion, encoder, top) if logprobs else None,
            **exact(choice),
        }
        for index, choice in enumerate(served.choices)
    ]
    body = _answer(served, "chat.completion", choices)
    return {**body, **(_openrlhf_token_ids(served) if token_ids else {})}


def _openrlhf_token_ids(served: CompletionResult) -> dict[str, Any]:
    """Return the ids of the prompt and of the first answer, under the names that OpenRLHF's example
    uses.
    """
    ids = served.choices[0].completion.output_ids.tolist()
    prompt = served.prompt_ids.tolist()
    return {"token_ids": {"prompt_token_ids": prompt, "completion_token_ids": ids}}


def text_body(
    served: CompletionResult, encoder: Encoder, *, logprobs: int | None, prompt_ids: bool
) -> dict[str, Any]:
    """Return a `text_completion` without the top-level field `prompt_token_ids`, which
    `CompletionResult.body` adds. `prompt_ids`: add a field `prompt_token_ids` to each choice, as
    vLLM does.
    """
    repeated = prompt_token_ids(served) if prompt_ids else {}
    choices = [
        {
            "index": index,
            "text": choice.text,
            "finish_reason": finish_reason(choice),
            "logprobs": text_logprobs(choice.completion, encoder, logprobs)
            if logprobs is not None
            else None,
            **exact(choice),
            **repeated,
        }
        for index, choice in enumerate(served.choices)
    ]
    return _answer(served, "text_completion", choices)


def is_long(completions: Sequence[Completion], *, logprobs: bool, top: int) -> bool:
    """Return True if writing `completions` as JSON takes so long that it should run in a thread.
    Logprobs take long, because each entry requires decoding a token.
    """
    tokens = sum(len(completion.output_ids) for completion in completions)
    return tokens * (10 * (1 + top) if logprobs else 1) > LONG


def _answer(served: CompletionResult, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer object of the type `kind` with `choices`."""
    return {
        "id": served.id,
        "object": kind,
        "created": served.created,
        "model": served.model,
        "choices": choices,
        "usage": served.usage,
        **constraint(served),
    }


def tokens(served: CompletionResult) -> dict[str, Any]:
    """Return the field `prompt_token_ids`, and the field `constrained` if a grammar constrained the
    sampling.
    """
    return {**prompt_token_ids(served), **constraint(served)}


def prompt_token_ids(served: CompletionResult) -> dict[str, Any]:
    """Return the field `prompt_token_ids`."""
    return {"prompt_token_ids": orjson.Fragment(b"[" + ids_json(served.prompt_ids) + b"]")}


def constraint(served: CompletionResult) -> dict[str, Any]:
    """Return the field `constrained`, which names the request field that caused a grammar
    constraint. Return an empty dict if there was no constraint.
    """
    return {"constrained": served.constrained} if served.constrained else {}


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
    assert choice.reading is not None
    return {**(choice.shown or choice.reading.message), "refusal": None}


def finish_reason(choice: Choice) -> str:
    """Return OpenAI's finish reason. A reply with tool calls has the reason `tool_calls` if it is
    complete, and `length` if it was truncated.
    """
    if (
        choice.completion.finish_reason == "stop"
        and choice.reading is not None
        and choice.reading.parsed.tool_calls
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
