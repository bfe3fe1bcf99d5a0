"""`Dialect`: one API in which agents talk to the endpoint, and what passes between it and the core.

Invariants: a dialect never touches tokens. It makes a `ChatRequest` with chat messages out of a
body, and its own objects out of the finished answer; the events of a stream add up to the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from toolroll.parsers.types import Delta
from toolroll.rollout.server.dialects.stored_response import KeptResponse
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.server.protocol import ChatRequest, CompletionRequest
from toolroll.rollout.server.result import CompletionResult
from toolroll.rollout.server.sessions import LiveSession
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.types import Tool

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a reply, translated.

    `request` has no messages: `messages` are the client's, in chat form, and are cleared once the
    prompt exists. `own`: the dialect's own request. `lineage`: labels of the client that say which
    agent asks (`thread_id` and the like).
    """

    request: ChatRequest
    messages: list[Any]
    tools: list[Tool]
    own: Any = None
    lineage: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamContext:
    """The data to parse and name the answers of a request while they are sampled.

    `tools`: None if none were offered. `seeds`: the seeds of call ids, one for each choice of a
    chat completion. `answer_id`, `created`: those of the finished answer. `prompt_tokens`: the
    length of the prompt.
    """

    template: ChatTemplate
    sampling_params: Mapping[str, Any]
    tools: Sequence[Tool] | None = None
    seeds: Sequence[str] = ()
    answer_id: str = ""
    created: int = 0
    prompt_tokens: int = 0

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        own = self.sampling_params.get("stop_token_ids") or ()
        return frozenset({*self.template.stop_token_ids, *own})


class ReplyWriter(Protocol):
    """Writes one streamed reply as the dialect's events."""

    def start(self) -> Iterable[Event]:
        """Return the events before the first piece."""
        ...

    def add(self, index: int, step: Delta) -> Iterable[Event]:
        """Return the events of one piece of choice `index`. A call has its id."""
        ...

    def finish(self, result: CompletionResult) -> AsyncIterator[Event]:
        """Yield the last events, after all pieces."""
        ...

    def failed(self, error: ApiError) -> Event:
        """Return the event of a request that failed after `start`."""
        ...


class Dialect(Protocol):
    """One API. The endpoint has one object of each kind."""

    @property
    def kind(self) -> str:
        """The name of its answers in a session's trace."""
        ...

    @property
    def prefix(self) -> str:
        """How the ids of its answers begin."""
        ...

    @property
    def exact(self) -> bool:
        """True if its answers hold the exact ids of the prompt."""
        ...

    @property
    def done(self) -> bytes:
        """The last bytes of a stream."""
        ...

    def translate(self, live: LiveSession, data: dict[str, Any]) -> Asked:
        """Return the request of the body `data`. Raise `ApiError`."""
        ...

    def body(self, asked: Asked, result: CompletionResult) -> dict[str, Any]:
        """Return the answer."""
        ...

    def writer(self, asked: Asked, context: StreamContext) -> ReplyWriter:
        """Return the writer of one stream."""
        ...

    def line(self, event: Event) -> bytes:
        """Return `event` as a server-sent event."""
        ...

    def refusal(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error."""
        ...

    def kept(self, asked: Asked, result: CompletionResult) -> KeptResponse | None:
        """Return what later requests refer to by the answer's id, None if they cannot."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked request without its messages. `dialect` and `asked` are None for a text
    completion.
    """

    request: ChatRequest | CompletionRequest
    dialect: Dialect | None = None
    asked: Asked | None = None


def data_line(event: Event) -> bytes:
    """Return an event without a name."""
    return b"data: " + orjson.dumps(event) + b"\n\n"


def named_line(event: Event) -> bytes:
    """Return an event with its type as its name."""
    return b"event: " + str(event["type"]).encode() + b"\n" + data_line(event)
