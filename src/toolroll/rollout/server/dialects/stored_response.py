"""`ResponseStore`: the responses of one session that later requests refer to by id.

Invariant: a stored response holds only its own output; its conversation is that of its turn, and
what equal requests repeat (tools, instructions) is kept once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from toolroll.rollout.server.turn import TurnNode
from toolroll.rollout.types import Message


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response: its turn, the instructions that it was asked with, and its two parts as JSON
    objects.
    """

    turn: TurnNode
    instructions: str
    echo: bytes
    answer: bytes

    @property
    def body(self) -> bytes:
        """The whole response as JSON."""
        return b"".join((memoryview(self.answer)[:-1], b",", memoryview(self.echo)[1:]))

    def messages(self, instructions: str) -> list[Message]:
        """Return its conversation as it was served, with other `instructions`: those of an earlier
        response are not carried over.
        """
        found = self.turn.messages()
        if instructions == self.instructions:
            return found
        if self.instructions:
            rest = found[0]["content"].removeprefix(self.instructions).removeprefix("\n\n")
            found[:1] = [{"role": "system", "content": rest}] if rest else []
        if instructions:
            found.insert(0, {"role": "system", "content": instructions})
        return found


class ResponseStore:
    """The stored responses of one session, by id."""

    def __init__(self) -> None:
        self._responses: dict[str, StoredResponse] = {}
        self._echoes: dict[bytes, bytes] = {}

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, None if it is not stored."""
        return self._responses.get(response_id)

    def add(
        self, turn: TurnNode, instructions: str, echo: dict[str, Any], answer: dict[str, Any]
    ) -> None:
        """Store a response under `answer["id"]`."""
        text = orjson.dumps(echo)
        text = self._echoes.setdefault(text, text)
        stored = StoredResponse(turn, instructions, text, orjson.dumps(answer))
        self._responses[answer["id"]] = stored
