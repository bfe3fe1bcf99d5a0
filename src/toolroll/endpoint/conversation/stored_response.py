"""`ResponseStore`: the responses of one session that later requests can refer to by id.

Invariants: a stored response holds only its own output. Its conversation is read from the tree of
turns. The fields that a response repeats from its request (such as tools and instructions) are
stored once if they are equal in several responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from toolroll.endpoint.conversation.conversation_tree import TurnNode
from toolroll.rollout.types import Message


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response without its conversation, which ends with `turn`: the response's id, the request's
    instructions, and two JSON objects. `echo` has the fields that repeat the request, and `answer`
    has all other fields. `turn` is None until the response is in a store.
    """

    id: str
    instructions: str
    echo: bytes
    answer: bytes
    turn: TurnNode | None = None

    @property
    def body(self) -> bytes:
        """The whole response as JSON."""
        return b"".join((memoryview(self.answer)[:-1], b",", memoryview(self.echo)[1:]))

    def messages(self, instructions: str) -> list[Message]:
        """Return the chat messages of the conversation, up to and including this response.
        `instructions` replace the instructions of the request that led to this response.
        """
        assert self.turn is not None
        messages = self.turn.messages()
        if instructions == self.instructions:
            return messages
        if self.instructions:
            system = messages[0]["content"].removeprefix(self.instructions).removeprefix("\n\n")
            messages[:1] = [{"role": "system", "content": system}] if system else []
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        return messages


@dataclass(frozen=True, slots=True)
class Origin:
    """What belongs to a reply apart from its tokens. `kind`: the name of its API in the trace.
    `lineage`: the client's labels. `response`: the response of the Responses API to store, if any.
    `ignored`: the paths of the request's fields that change no token.
    """

    kind: str
    lineage: Mapping[str, str]
    response: StoredResponse | None = None
    ignored: Sequence[str] = ()


class ResponseStore:
    """The stored responses of one session, by id."""

    def __init__(self) -> None:
        self._responses: dict[str, StoredResponse] = {}
        self._echoes: dict[bytes, bytes] = {}

    def get(self, response_id: str) -> StoredResponse | None:
        """Return the response with this id. Return None if it is not stored."""
        return self._responses.get(response_id)

    def item(self, item_id: str) -> dict[str, Any] | None:
        """Return the output item with this id. Return None if it is not stored."""
        # `ResponsesWriter` makes the id of an item from the response's id
        stored = self.get(f"resp_{item_id.partition('_')[2].rpartition('_')[0]}")
        output = [] if stored is None else orjson.loads(stored.answer)["output"]
        return next((item for item in output if item["id"] == item_id), None)

    def add(self, turn: TurnNode, response: StoredResponse) -> None:
        """Store `response`, whose reply is that of `turn`."""
        echo = self._echoes.setdefault(response.echo, response.echo)
        self._responses[response.id] = replace(response, turn=turn, echo=echo)
