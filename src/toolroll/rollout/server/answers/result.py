"""The result of one request: its prompt, its completions and their parsed turns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import orjson

from toolroll.parsers.types import Delta
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.runtime.jsonable import ids_json
from toolroll.rollout.server.answers.choice_stream import ChoiceStream
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Completion, IdArray, Message

logger = logging.getLogger(__name__)

LONG = 25_000
"""The maximum number of tokens that are parsed, or written as JSON, on the event loop."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One answer to a request. `text` is the text for the client. `turn` is the whole parsed turn.
    `message` is the message for the client, if it is only a part of the message of `turn`. `stream`
    is a stream that was not used yet.

    A text completion has only `completion` and `text`. A choice that was restored from disk has
    only `completion` and, for a reply, `turn`.
    """

    completion: Completion
    text: str = ""
    turn: ParsedTurn | None = None
    message: Message | None = None
    stream: ChoiceStream | None = field(default=None, repr=False)

    @cached_property
    def pieces(self) -> list[Delta]:
        """The reasoning, text and calls of a reply, in the order in which the model wrote them. The
        joined deltas of a stream of the reply are these pieces.

        In two cases, the order is not known. Then the calls come last. The first case is a reply
        that continues an assistant message. The second is a reply that a stream could not send,
        because the stream would contradict the finished reply.
        """
        assert self.turn is not None
        if self.message is None and self.stream is not None:
            try:
                return joined(self.stream.finish(self.completion, self.text, self.turn))
            except ApiError as error:  # the message is right, so only a stream fails
                logger.warning("the order of text and calls is not known: %s", error)
        return list(_by_kind(self.message or self.turn.message, self.turn))


def joined(steps: Iterable[Delta]) -> list[Delta]:
    """Return the deltas `steps`. Adjacent deltas of the same kind are joined into one, except
    calls.
    """
    pieces: list[Delta] = []
    for _, same in groupby(steps, lambda step: step.kind):
        first, *rest = same
        if first.call is not None:
            pieces += [first, *rest]
        else:
            pieces.append(replace(first, text="".join(step.text for step in (first, *rest))))
    return pieces


def _by_kind(message: Message, turn: ParsedTurn) -> Iterator[Delta]:
    if thought := message.get("reasoning_content"):
        yield Delta("reasoning", str(thought))
    if text := message.get("content"):
        yield Delta("content", str(text))
    for call in turn.parsed.tool_calls:
        yield Delta("tool_call", call=call)


@dataclass(slots=True, eq=False, kw_only=True)
class CompletionResult:
    """The answers to a request.

    While the engine samples, `choices` is empty. `sampling_params`: the parameters that were sent.
    `constrained`: the request field that caused a grammar constraint, if there was one. `first`:
    the number of earlier answers to the same prompt. `stop_strings`: the stop strings that are cut
    from a chat reply's text.
    """

    id: str
    created: int
    model: str
    prompt_ids: IdArray
    choices: list[Choice] = field(default_factory=list)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    constrained: str | None = None
    first: int = 0
    stop_strings: Sequence[str] = ()

    @property
    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage, including cached tokens."""
        prompt = len(self.prompt_ids)
        sampled = sum(len(choice.completion.output_ids) for choice in self.choices)
        cached = max((choice.completion.cached_tokens for choice in self.choices), default=0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


# --- bodies ---------------------------------------------------------------------------------------


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
    return {**(choice.message or choice.turn.message), "refusal": None}


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
    for position, (index, value) in enumerate(
        zip(completion.output_ids.tolist(), completion.logprobs.tolist(), strict=True)
    ):
        likeliest = (
            completion.top_logprobs[position][:top] if top and completion.top_logprobs else ()
        )
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
