"""Answers in OpenAI's wire format, with the exact ids beside them: `prompt_token_ids`,
`choices[i].token_ids`, and the id of every token in the logprobs (the stop token included, so that
they align with `token_ids`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from toolroll.rollout.server.received import LONG
from toolroll.rollout.server.result import Choice, CompletionResult
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Completion, IdArray


def chat_body(
    served: CompletionResult, encoder: Encoder, *, logprobs: bool, top: int
) -> dict[str, Any]:
    """A `chat.completion`, without the prompt's ids."""
    choices = []
    for index, choice in enumerate(served.choices):
        entry = {
            "index": index,
            "message": wire_message(choice),
            "finish_reason": finish_reason(choice),
            "logprobs": chat_logprobs(choice.completion, encoder, top) if logprobs else None,
            **exact(choice),
        }
        choices.append(entry)
    return {
        **head(served, "chat.completion"),
        "choices": choices,
        "usage": served.usage,
        **constraint(served),
    }


def text_body(
    served: CompletionResult, encoder: Encoder, *, logprobs: int | None, prompt_ids: bool
) -> dict[str, Any]:
    """A `text_completion`, without the prompt's ids; with `prompt_ids`, they are in each choice, as
    vLLM writes them.
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
    return {
        **head(served, "text_completion"),
        "choices": choices,
        "usage": served.usage,
        **constraint(served),
    }


def is_long(completions: Sequence[Completion], *, logprobs: bool, top: int) -> bool:
    """Return whether an answer of these takes long to write: each logprob decodes its token."""
    tokens = sum(len(completion.output_ids) for completion in completions)
    return tokens * (10 * (1 + top) if logprobs else 1) > LONG


def head(served: CompletionResult, kind: str) -> dict[str, Any]:
    """What every object begins with."""
    return {"id": served.id, "object": kind, "created": served.created, "model": served.model}


def tokens(served: CompletionResult) -> dict[str, Any]:
    """The exact prompt, and by what the sampling was constrained."""
    return {**prompt_token_ids(served), **constraint(served)}


def prompt_token_ids(served: CompletionResult) -> dict[str, Any]:
    """The exact prompt."""
    return {"prompt_token_ids": orjson.Fragment(b"[" + served.prompt_json + b"]")}


def constraint(served: CompletionResult) -> dict[str, Any]:
    """By what the sampling was constrained, if it was."""
    return {"constrained": served.constrained} if served.constrained else {}


def exact(choice: Choice) -> dict[str, Any]:
    """What was sampled, and what it stopped at."""
    completion = choice.completion
    return {
        "token_ids": completion.output_ids.tolist(),
        "stop_reason": completion.matched,
        "weight_version": completion.weight_version,
    }


def wire_message(choice: Choice) -> dict[str, Any]:
    """The message as a client gets it."""
    assert choice.reading is not None
    return {**(choice.shown or choice.reading.message), "refusal": None}


def finish_reason(choice: Choice) -> str:
    """`length` stays `length` whatever stands in the reply; `tool_calls` where it ended by
    itself with a call.
    """
    if (
        choice.completion.finish_reason == "stop"
        and choice.reading is not None
        and choice.reading.parsed.tool_calls
    ):
        return "tool_calls"
    return choice.completion.finish_reason


def chat_logprobs(completion: Completion, encoder: Encoder, top: int) -> dict[str, Any]:
    """`content`: one entry a sampled token."""
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
    """The form of text completions."""
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
    """An answer as it was sampled, from exactly `prompt_ids`."""

    kind: str
    prompt_ids: IdArray
    completion: Completion
    excluded: str | None

    @property
    def body(self) -> dict[str, Any]:
        """The same as JSON."""
        logprobs = self.completion.logprobs
        return {
            "object": self.kind,
            "prompt_token_ids": self.prompt_ids.tolist(),
            "completion_token_ids": self.completion.output_ids.tolist(),
            "logprobs": logprobs.tolist() if logprobs is not None else None,
            "finish_reason": self.completion.finish_reason,
            "excluded": self.excluded,
        }
