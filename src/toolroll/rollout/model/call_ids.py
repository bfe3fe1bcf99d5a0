"""Ids for tool calls, for model formats without ids.

An id has nine characters of [A-Za-z0-9], because Mistral's chat template accepts only such ids. It
is a hash of the session id, the position of the turn and the index of the call. So the same session
id, turn and index always give the same id.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from toolroll.parsers.types import ParsedReply

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LENGTH = 9


def call_id(seed: str, index: int) -> str:
    """Return the id of the call with the index `index` in its turn. `seed` identifies the turn."""
    number = int.from_bytes(
        hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "big"
    )
    characters = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[digit])
    return "".join(characters)


def with_call_ids(reply: ParsedReply, seed: str) -> ParsedReply:
    """Return `reply` with an id for every call that has none. `seed` identifies the turn."""
    if all(call.id for call in reply.tool_calls):
        return reply
    calls = tuple(
        call if call.id else call.with_id(call_id(seed, index))
        for index, call in enumerate(reply.tool_calls)
    )
    return replace(reply, tool_calls=calls)
