"""The result of a parser: the reasoning of a reply, its visible text, and every tool call with a
status.

Invariant: nothing that the model wrote is lost. Each character of the reply, except white space
between these parts, is reasoning, content, a call's `raw`, or the format's own marker. A call that
cannot be read is kept, with its raw text and the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

Span = tuple[int, int]
"""[start, stop), in characters unless stated otherwise."""


class CallStatus(StrEnum):
    """The outcome of parsing one tool call."""

    OK = "ok"
    INVALID_JSON = "invalid_json"  # the arguments (or the whole call) cannot be read
    UNCLOSED = "unclosed"  # the reply ended inside the call
    UNKNOWN_TOOL = "unknown_tool"  # well-formed, but no tool of that name was offered
    MISSING_NAME = "missing_name"
    BAD_ARGUMENTS = "bad_arguments"  # readable, but not by the JSON schema, or a key is unclear
    DUPLICATE_ID = "duplicate_id"
    LOOKS_LIKE_A_CALL = "looks_like_a_call"  # text of the reply; see `ParsedReply.lookalikes`


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. It may be unreadable.

    `arguments` is the decoded JSON object, or None if it could not be read. `raw` is the text
    between the format's markers, as the model wrote it. `span` is the call's character range
    `[start, stop)` in the reply. `token_span` is the call's range in the token ids of the reply, or
    None if the parser got no offsets. `id` is the id that the model wrote, or "" until `with_id`
    sets one. `error` is an error message that can be given to the model.
    """

    name: str
    arguments: dict[str, Any] | None
    raw: str
    status: CallStatus = CallStatus.OK
    error: str | None = None
    id: str = ""
    span: tuple[int, int] | None = None
    token_span: tuple[int, int] | None = None

    @property
    def ok(self) -> bool:
        """True if the call can be executed."""
        return self.status is CallStatus.OK

    def failed(self, status: CallStatus, error: str) -> ToolCall:
        """Return the same call with `status` and `error`, or if it is not ok, the call itself."""
        return replace(self, status=status, error=error) if self.ok else self

    def with_id(self, call_id: str) -> ToolCall:
        """Return the same call with the id `call_id`."""
        return replace(self, id=call_id)


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A parsed reply.

    `content` is the visible text without reasoning and without calls. `tool_calls` contains every
    call, in the order in which the calls were written. `reasoning_closed` is False if the reply
    ended inside its reasoning. `lookalikes` contains the parts of `content` that look like calls of
    the offered tools but are not calls, and the blocks without a call; they have no id and no span.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = field(default=())
    reasoning_closed: bool = True
    lookalikes: tuple[ToolCall, ...] = ()

    @property
    def ok_calls(self) -> tuple[ToolCall, ...]:
        """The calls that can be executed, in order."""
        return tuple(call for call in self.tool_calls if call.ok)

    @property
    def bad_calls(self) -> tuple[ToolCall, ...]:
        """The calls that cannot be executed, in order."""
        return tuple(call for call in self.tool_calls if not call.ok)


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of a streamed reply: a piece of reasoning, a piece of content, or a whole call.

    The joined pieces of each kind are `ParsedReply.reasoning` and `ParsedReply.content`. The calls
    are `ParsedReply.tool_calls`. There are no deltas for `ParsedReply.lookalikes`.
    """

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    call: ToolCall | None = None


class UnknownParserError(ValueError):
    """No parser has this name, or no parser can read the calls that this chat template renders."""
