"""`Heard`: the messages of a request, read; and `Hearings`: those that a session's clients sent last.

A client sends the whole conversation each time. Where it goes on from its last answered request, that is known again by its bytes,
and only what is new is checked, read and compared with what was served. A request that goes on from an earlier place (a branch, a
turn that is asked for again) is read whole.

Invariants: a request begins with what was heard only where its messages, decoded JSON that is written as JSON again, begin with the
same bytes, so that the order of keys counts, and 1, 1.0 and true are three things. What was heard never changes: more of it is a new
object. What comes of a request does not depend on what was heard before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import orjson

from toolroll.rollout.server.errors import refused
from toolroll.rollout.server.messages import Digest, Echo, read_messages
from toolroll.rollout.server.served_turn import Repeated
from toolroll.rollout.types import Message

_KEPT = 8
"""Conversations of one session at a time: an agent's and its sub-agents'."""
_BYTES = 16 * 2**20
"""Of their texts together."""


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """`text`: the messages as JSON, without the bracket that closes the list; `key`: what two attempts have in common, in which the
    order of keys does not count. `messages`: as they were read, and `echo` at their end. `ends`: how many messages there are up to
    each assistant's, and the digest there (from the end of `repeated` on). `repeated`: what of it was found served."""

    text: bytes = b"["
    key: bytes = b""
    messages: list[Message] = field(default_factory=list)
    echo: Echo = field(default_factory=Echo)
    ends: list[tuple[int, Digest]] = field(default_factory=list)
    repeated: Repeated | None = None

    def read_on(self, text: bytes, key: bytes, new: Sequence[Any], *, developer: bool) -> Heard:
        """With `new` messages behind; `text` and `key` of all of them. Refuses what cannot be honoured, as `read_messages` does."""
        begun = len(self.messages)
        read = read_messages(new, developer=developer, begun=self.messages)
        echo, ends = self.echo.copy(), [*self.ends]
        for at, message in enumerate(read, begun + 1):
            digest = echo.add(message)
            if message["role"] == "assistant":
                ends.append((at, digest))
        return Heard(text, key, [*self.messages, *read], echo, ends, self.repeated)


NOTHING = Heard()


class Hearings:
    """What was heard last in one session."""

    def __init__(self) -> None:
        self._kept: list[Heard] = []

    def begin(self, text: bytes) -> Heard:
        """The longest that the messages `text` begin with. Each text holds whole messages: what begins with them in bytes has them as
        its first ones."""
        return max((one for one in self._kept if text.startswith(one.text)), key=lambda one: len(one.text), default=NOTHING)

    def keep(self, said: Heard, repeated: Repeated | None, instead: Heard) -> None:
        """Remember `said`, in which `repeated` was found, in the place of what it goes on from."""
        if repeated is not None:
            said = _settled(said, repeated, len(instead.messages))
        self._kept = [*(one for one in self._kept if one is not instead), said][-_KEPT:]
        while self._kept and sum(len(one.text) for one in self._kept) > _BYTES:
            del self._kept[0]


def _settled(said: Heard, repeated: Repeated, begun: int) -> Heard:
    """`said` with `repeated`; the messages (from `begun` on) that came back exactly as they were served are held once."""
    messages = [*said.messages]
    for at in range(begun, repeated.length):
        if orjson.dumps(messages[at]) == orjson.dumps(repeated.served[at]):
            messages[at] = repeated.served[at]
    return replace(said, messages=messages, ends=[end for end in said.ends if end[0] >= repeated.length], repeated=repeated)


def text_of(messages: Sequence[Any]) -> bytes:
    """`messages` as JSON, without the bracket that closes the list."""
    return _json(messages)[:-1]


def key_of(before: bytes, new: Sequence[Any]) -> bytes:
    """The key of messages, `before` that of those before `new`. It depends on the messages alone, not on which of them are new."""
    for message in new:
        before = blake2b(before + _json(message, orjson.OPT_SORT_KEYS), digest_size=16).digest()
    return before


def body_key(kind: str, body: Mapping[str, Any], messages: bytes = b"") -> bytes:
    """What two attempts of one request have in common; `messages`: the key of its messages, which stand for them."""
    rest = {name: value for name, value in body.items() if not (messages and name == "messages")}
    return blake2b(messages + kind.encode() + _json(rest, orjson.OPT_SORT_KEYS), digest_size=16).digest()


def _json(value: Any, option: int = 0) -> bytes:
    try:
        return orjson.dumps(value, option=option)
    except TypeError as error:
        raise refused("body", f"the body is no JSON: {error}", code="invalid_json") from error
