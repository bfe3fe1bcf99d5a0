"""Ids for tool calls that the model's format does not number.

Nine characters of [A-Za-z0-9], the only ids that Mistral's chat template takes, derived from the
session, the turn's place and the call's index: the same episode played again gets the same ids.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from toolroll.parsers.types import ParsedReply

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LENGTH = 9


def call_id(place: str, index: int) -> str:
    """The id of call `index` of the turn at `place`."""
    number = int.from_bytes(
        hashlib.blake2b(f"{place}/{index}".encode(), digest_size=8).digest(), "big"
    )
    characters = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[digit])
    return "".join(characters)


def with_call_ids(reply: ParsedReply, place: str) -> ParsedReply:
    """`reply` with an id for every call that has none."""
    if all(call.id for call in reply.tool_calls):
        return reply
    calls = tuple(
        call if call.id else call.with_id(call_id(place, index))
        for index, call in enumerate(reply.tool_calls)
    )
    return replace(reply, tool_calls=calls)
