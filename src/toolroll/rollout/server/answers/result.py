"""The result of one request: its prompt, its completions and their parsed turns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from toolroll.parsers.types import Delta
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.server.answers.choice_stream import ChoiceStream
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.types import Completion, IdArray, Message

logger = logging.getLogger(__name__)

LONG = 25_000
"""The maximum number of tokens that are parsed, or written as JSON, on the event loop."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One answer to a request. `text` is the text for the client. `turn` is the whole parsed turn.
    `shown` is the message for the client, if it is only a part of the message of `turn`. `stream`
    is a stream that was not used yet.

    A text completion has only `completion` and `text`. A choice that was restored from disk has
    only `completion` and, for a reply, `turn`.
    """

    completion: Completion
    text: str = ""
    turn: ParsedTurn | None = None
    shown: Message | None = None
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
        if self.shown is None and self.stream is not None:
            try:
                return joined(self.stream.finish(self.completion, self.text, self.turn))
            except ApiError as error:  # the message is right, so only a stream fails
                logger.warning("the order of text and calls is not known: %s", error)
        return list(_by_kind(self.shown or self.turn.message, self.turn))


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
