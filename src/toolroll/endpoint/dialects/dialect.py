"""`Dialect`: an API that agents use to talk to the endpoint, and its interface to the endpoint.

Invariants: a dialect never changes tokens. It converts a request to a `ChatRequest` with chat
messages, and converts the finished answer to the API's own objects. The events of a stream add up
to the answer that the same request gets without `stream`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import orjson

from toolroll.endpoint.answers.result import CompletionResult
from toolroll.endpoint.conversation.stored_response import ResponseStore, StoredResponse
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.requests.ignored_fields import IgnoredFields
from toolroll.endpoint.requests.request_bodies import ChatRequest, CompletionRequest
from toolroll.endpoint.requests.tool_list import ToolList
from toolroll.parsers.types import Delta

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A validated request, which a dialect has translated to chat completions.

    `request` has all fields except the messages. `messages` are the client's messages in the form
    of chat completions. The endpoint clears this list after it has built the prompt. `tools` are
    the client's tools in the form of chat completions. `original` is the request in the dialect's
    own form. `lineage`: the client's labels for the agent that sent the request (`thread_id` and
    similar labels). `ignored`: the fields that change no token.

    A text completion has only `request`, which is a `CompletionRequest`.
    """

    request: ChatRequest | CompletionRequest
    messages: list[Any] = field(default_factory=list)
    tools: ToolList = field(default_factory=partial(ToolList.of, []))
    original: Any = None
    lineage: Mapping[str, str] = field(default_factory=dict)
    ignored: IgnoredFields = field(default_factory=IgnoredFields)

    @property
    def chat(self) -> ChatRequest:
        """The request of a chat completion."""
        assert isinstance(self.request, ChatRequest)
        return self.request

    @property
    def text(self) -> CompletionRequest:
        """The request of a text completion."""
        assert isinstance(self.request, CompletionRequest)
        return self.request


class ReplyWriter(Protocol):
    """Writes one streamed reply as the dialect's events."""

    def start(self) -> Iterable[Event]:
        """Return the events before the first delta."""
        ...

    def add(self, index: int, step: Delta) -> Iterable[Event]:
        """Return the events for one delta of choice `index`. If the delta is a tool call, the call
        already has its id.
        """
        ...

    def finish(self) -> AsyncIterator[Event]:
        """Yield the last events, after all deltas."""
        ...

    def failed(self, error: ApiError) -> Event:
        """Return the event for a request that failed after `start`."""
        ...


class Dialect(ABC):
    """One API. The endpoint has one object for each API."""

    kind: ClassVar[str]
    """The name for the API's answers in a session's trace."""
    prefix: ClassVar[str]
    """The prefix of the ids of the API's answers."""
    done: ClassVar[bytes] = b""
    """The last bytes of a stream."""

    @abstractmethod
    def translate(self, data: dict[str, Any], responses: ResponseStore) -> ParsedRequest:
        """Return the request in `data`. Raise `ApiError` if it is not valid. `responses`: the
        stored responses of the session, to which the request may refer.
        """

    @abstractmethod
    def body(self, parsed: ParsedRequest, result: CompletionResult) -> dict[str, Any]:
        """Return the answer."""

    @abstractmethod
    def writer(self, parsed: ParsedRequest, result: CompletionResult) -> ReplyWriter:
        """Return the writer of one stream. `result` has no choices before the writer's `finish` is
        called.
        """

    @abstractmethod
    def refusal(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error."""

    def line(self, event: Event) -> bytes:
        """Return `event` as a server-sent event, with its type in the `event:` field."""
        return b"event: " + str(event["type"]).encode() + b"\n" + data_line(event)

    def stored(self, parsed: ParsedRequest, result: CompletionResult) -> StoredResponse | None:
        """Return the data to store, so that later requests can refer to the answer by id. Return
        None if the answer is not stored.
        """
        return None


def data_line(event: Event) -> bytes:
    """Return `event` as a server-sent event without an `event:` field."""
    return b"data: " + orjson.dumps(event) + b"\n\n"
