"""The result of one request: its prompt, its completions and their parsed turns; its body, and the
streams of its choices.

Invariants:

- A body has the exact token ids in addition to OpenAI's fields: `prompt_token_ids`,
  `choices[i].token_ids`, and each token's id in the logprobs. The logprobs include the stop token,
  so that they align with `token_ids`.
- Text that a stream has sent is never taken back. Incomplete characters, possible stop strings and
  possible stop tokens are held back until they are certain. The parser holds back text that may
  begin a marker of its format. The joined deltas are the message of the finished answer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import orjson

from toolroll.endpoint.errors import ApiError
from toolroll.parsers.base import ReplyStream
from toolroll.parsers.types import Delta, Span
from toolroll.rollout.model.turn import ParsedTurn, call_id, with_call_ids
from toolroll.rollout.runtime.jsonable import ids_json
from toolroll.rollout.runtime.routed_experts import to_json as experts_to_json
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.encode import Encoder, TextDecoder
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
    """Return `steps` with adjacent deltas of one kind joined, except calls."""
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


@dataclass(eq=False, kw_only=True)
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

    @cached_property
    def prompt_json(self) -> bytes:
        """`prompt_ids` as JSON text without brackets, for the engine and for the body."""
        return ids_json(self.prompt_ids)

    def free(self) -> None:
        """Free `prompt_json`. If it is needed again, it is made again."""
        self.__dict__.pop("prompt_json", None)

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
    return {"prompt_token_ids": orjson.Fragment(b"[" + result.prompt_json + b"]")}


def constraint(result: CompletionResult) -> dict[str, Any]:
    """Return the field `constrained`, which names the request field that caused a grammar
    constraint. Return an empty dict if there was no constraint.
    """
    return {"constrained": result.constrained} if result.constrained else {}


def exact(choice: Choice) -> dict[str, Any]:
    """Return the sampled ids, the stop token or stop string, the weight version, and the routed
    experts if the engine records them.
    """
    completion = choice.completion
    ids, rows, experts = completion.output_ids, completion.routed_experts, {}
    if rows is not None:
        start = completion.prompt_tokens + len(ids) - 1 - len(rows)
        experts = {"routed_experts": {**experts_to_json(rows), "start": start}}
    return {
        "token_ids": ids.tolist(),
        "stop_reason": completion.matched,
        "weight_version": completion.weight_version,
        **experts,
    }


def traced(answer: tuple[Node, str], prompt_ids: IdArray) -> dict[str, Any]:
    """Return an entry of the trace: a sampled node with the name of its API, and its prompt."""
    node, kind = answer
    completion = node.completion
    assert completion is not None
    logprobs = completion.logprobs
    return {
        "object": kind,
        "prompt_token_ids": prompt_ids.tolist(),
        "completion_token_ids": completion.output_ids.tolist(),
        "logprobs": logprobs.tolist() if logprobs is not None else None,
        "finish_reason": completion.finish_reason,
        "excluded": node.excluded,
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
                "top_logprobs": [_token(encoder, token, logprob) for logprob, token in likeliest],
            }
        )
    return {"content": entries, "refusal": None}


def _token(encoder: Encoder, index: int, logprob: float) -> dict[str, Any]:
    text = encoder.decode([index])
    complete = "\ufffd" not in text
    return {
        "token": text,
        "token_id": index,
        "logprob": logprob,
        "bytes": list(text.encode()) if complete else None,
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
            {encoder.decode([token]): value for value, token in place[:top]} for place in places
        ]
        if top
        else None,
    }


# --- streams --------------------------------------------------------------------------------------


Piece = tuple[str, list[Span]]
"""New text, and the spans of the tokens that start in it. A span is a start and a stop position in
the text.
"""


class TextStream:
    """Decodes a growing list of ids to pieces of text. Later ids never change an earlier piece.

    The last token is held back if it may be a stop token. It may be one if it is in
    `stop_token_ids`, or if it is any special token, because the engine may have further stop
    tokens.
    """

    def __init__(
        self, encoder: Encoder, stop_token_ids: Collection[int], stop_strings: Sequence[str]
    ) -> None:
        self._encoder = encoder
        self._stop_token_ids = stop_token_ids
        self._stop_strings = tuple(stop_strings)
        self._decoder = TextDecoder(encoder)
        self._read = 0  # number of ids read
        self._sent: list[str] = []
        self._held = ""
        self._size = 0  # length of the text that was returned
        self._spans: list[Span] = []  # of the tokens that start after that text

    def feed(self, ids: Sequence[int]) -> Piece:
        """Return the new text that later ids cannot change. `ids` are all ids sampled so far."""
        holds_last = bool(ids) and self._may_stop(ids[-1])
        self._read_ids(ids[self._read : len(ids) - holds_last])
        return self._take(self._certain())

    def finish(self, ids: Sequence[int], text: str) -> Piece:
        """Return the part of the finished `text` that was not returned yet. `ids` are all sampled
        ids. A caller that uses the returned spans must leave out the id of the stop token.

        Raise `ApiError` if `text` does not start with the text that was returned before.
        """
        self._read_ids(ids[self._read :], last=True)
        sent = "".join(self._sent)
        if not text.startswith(sent):
            raise stream_error("its text")
        self._held = text[len(sent) :]
        return self._take(len(self._held))

    def _read_ids(self, ids: Sequence[int], *, last: bool = False) -> None:
        text, spans = self._decoder.feed(ids, last=last)
        self._read += len(ids)
        self._held += text
        self._spans += spans

    def _may_stop(self, token_id: int) -> bool:
        return (
            token_id in self._stop_token_ids
            or self._encoder.text_of(token_id) in self._encoder.special
        )

    def _certain(self) -> int:
        """Return how many characters of the held text can be returned: those before the first stop
        string, or before a last part that may be the start of a stop string.
        """
        starts = [start for stop in self._stop_strings if (start := self._held.find(stop)) >= 0]
        if starts:
            return min(starts)
        begun = (
            length
            for stop in self._stop_strings
            for length in range(1, len(stop))
            if self._held.endswith(stop[:length])
        )
        return len(self._held) - max(begun, default=0)

    def _take(self, length: int) -> Piece:
        """Return the first `length` characters of the held text, with the spans of their tokens."""
        text, self._held = self._held[:length], self._held[length:]
        begin = self._size
        self._size += length
        count = sum(start < self._size for start, _ in self._spans)
        spans, self._spans = self._spans[:count], self._spans[count:]
        self._sent.append(text)
        return text, [(start - begin, stop - begin) for start, stop in spans]


class ChoiceStream:
    """The deltas of one choice. `seed` determines the ids of its calls (`call_id`), as in the
    finished answer. `reply` is None for a text completion.

    A call is one delta, with its id. It is returned as soon as the parser is certain of it.
    """

    def __init__(self, text: TextStream, reply: ReplyStream | None = None, seed: str = "") -> None:
        self._text = text
        self._reply = reply
        self._seed = seed
        self._calls = 0

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Return the new deltas that later ids cannot change. `ids` are all ids sampled so far."""
        text, spans = self._text.feed(ids)
        if not text:
            return []
        if self._reply is None:
            return [Delta("content", text)]
        return [self._with_id(step) for step in self._reply.feed(text, offsets=spans)]

    def finish(self, completion: Completion, text: str, turn: ParsedTurn | None) -> list[Delta]:
        """Return the remaining deltas of the finished `text`, which was parsed as `turn`. For a
        text completion, return none, because its last chunk has the rest of the text.

        Raise `ApiError` if the answer contradicts the deltas that were returned before.
        """
        ids = completion.output_ids.tolist()
        if turn is None or self._reply is None:
            self._text.finish(ids, text)
            return []
        unsent, spans = self._text.finish(ids[: len(ids) - bool(turn.sampled.stop)], text)
        steps = self._reply.finish(unsent, offsets=spans)
        if with_call_ids(self._reply.reply, self._seed) != turn.parsed:
            raise stream_error("its message")
        return [self._with_id(step) for step in steps]

    def _with_id(self, step: Delta) -> Delta:
        if step.call is None:
            return step
        index = self._calls
        self._calls += 1
        named = step.call if step.call.id else step.call.with_id(call_id(self._seed, index))
        return replace(step, call=named)


def stream_error(part: str) -> ApiError:
    """Return the error for a stream whose `part` contradicts the finished answer."""
    return ApiError(
        500,
        "stream_mismatch",
        f"the stream is wrong: {part} differs from the finished answer. Send the request again "
        "without `stream`, and report this with the model and its tool-call parser",
    )
