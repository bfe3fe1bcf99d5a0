"""Learned frames: the fixed pieces around new messages' bodies, so that a delta costs a look-up, a join and one encode.

For a signature (what the template can see of history, of the last turn, and of the new messages) the appended text is fixed
pieces with the bodies between them. The pieces are learned by deriving once with nonces in the bodies' places, and kept only if
they reproduce the text that was derived for the real bodies. Only deltas that append are learned: a rewrite is derived anew each
time.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolroll.rollout.template.encode import Span
from toolroll.rollout.template.features import Features, Kind
from toolroll.rollout.types import Message

_TAG = secrets.token_hex(3).translate(str.maketrans("abcdef", "ghijkl"))


def _id_nonce(index: int) -> str:
    return f"Z{_TAG}{index:02d}"  # nine of [A-Za-z0-9]: Mistral's template takes no other id


def _name_nonce(index: int) -> str:
    return f"zq_{_TAG}_{index}_z"


def _body_nonce(index: int) -> str:
    return f"Zb{_TAG}{index}b"


EDGES = (' \n"\\é<', '\n "\\é<')
"""Put around a body's nonce: tells raw text from stripped and from JSON-escaped text, whichever white space is stripped."""


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_ascii(text: str) -> str:
    return json.dumps(text)[1:-1]


_TRANSFORMS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    str.lstrip,
    str.rstrip,
    _json,
    _json_ascii,
    lambda text: _json(text.strip()),
)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a body stands: `source` of which it is the text, `transform` what the template makes of it."""

    source: tuple[str, int]
    transform: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Frame:
    """The pieces of an appended text, in order: fixed strings and slots."""

    pieces: tuple[str | Slot, ...]

    def fill(self, turn: Message, new: Sequence[Message]) -> tuple[str, list[Span]]:
        """The appended text for these messages, and where their contents stand in it."""
        parts: list[str] = []
        bodies: list[Span] = []
        length = 0
        for piece in self.pieces:
            if isinstance(piece, str):
                text = piece
            else:
                text = piece.transform(source_text(piece.source, turn, new))
                bodies.append((length, length + len(text)))
            parts.append(text)
            length += len(text)
        return "".join(parts), bodies


def source_text(source: tuple[str, int], turn: Message, new: Sequence[Message]) -> str:
    """The text that a slot of this source stands for."""
    kind, index = source
    if kind == "content":
        return str(new[index]["content"])
    if kind == "new_name":
        return str(new[index]["name"])
    call = turn["tool_calls"][index]
    return str(call["id"] if kind == "id" else call["function"]["name"])


def signature(features: Features, turn: Message, new: Sequence[Message]) -> Kind | None:
    """What the frame of these new messages depends on, besides history; None where no frame may be used: a content that holds
    a string which the template tests for, or that is no text."""
    calls = turn.get("tool_calls") or ()
    ids = {call.get("id"): index for index, call in enumerate(calls)}
    kinds: list[Kind] = []
    for message in new:
        if message.get("role") == "assistant":
            return None  # a turn that was never served: rare, and not worth a frame
        kind = features.text_kind(message.get("content"))
        if len(kind) > 1 or kind[0] in ("parts", "blank"):  # a blank body has no room for a nonce
            return None
        refers = ids.get(message.get("tool_call_id")) if message.get("tool_call_id") else None
        if message.get("tool_calls") or (message.get("tool_call_id") and refers is None):
            return None
        name = message.get("name")
        named = None if name is None else (refers is not None and name == calls[refers]["function"]["name"])
        others = tuple(sorted(key for key in message if key not in ("role", "content", "tool_call_id", "name")))
        if others:
            return None
        kinds.append((message.get("role"), kind[0], refers, named))
    return (len(calls), len(ids), tuple(kinds))


def with_nonces(turn: Message, new: Sequence[Message], edge: str) -> tuple[Message, list[Message]]:
    """The same turn and new messages with a nonce for each call id, call name, name and body; `edge` is one of `EDGES`."""
    calls = [dict(call) for call in turn.get("tool_calls") or ()]
    ids: dict[Any, int] = {}
    names: dict[int, str] = {}
    for index, call in enumerate(calls):
        ids[call.get("id")] = index
        names[index] = call["function"]["name"]
        call["function"] = {**call["function"], "name": _name_nonce(index)}
        if call.get("id"):
            call["id"] = _id_nonce(index)
    masked: list[Message] = []
    for index, message in enumerate(new):
        copy = dict(message)
        refers = ids.get(message.get("tool_call_id")) if message.get("tool_call_id") else None
        if refers is not None:
            copy["tool_call_id"] = _id_nonce(refers)
        if message.get("name") is not None:
            same = refers is not None and message["name"] == names[refers]
            copy["name"] = _name_nonce(refers if same and refers is not None else 50 + index)
        if (message.get("content") or "").strip():
            copy["content"] = edge + _body_nonce(index) + edge[::-1]
        masked.append(copy)
    return ({**turn, "tool_calls": calls} if calls else turn), masked


def learn(texts: Sequence[str], turn: Message, new: Sequence[Message]) -> Frame | None:
    """The frame in `texts`, which were derived for `with_nonces(turn, new, edge)` with each of `EDGES`; None where they disagree, or
    where a body's place or transformation is not understood."""
    found = [_learn(text, turn, new, edge) for text, edge in zip(texts, EDGES, strict=True)]
    return found[0] if all(frame == found[0] for frame in found) else None


def _learn(text: str, turn: Message, new: Sequence[Message], edge: str) -> Frame | None:
    """The frame in `text`, derived with one edge; None where a body's place or transformation is not
    understood."""
    found: list[tuple[int, int, Slot]] = []
    for index in range(len(turn.get("tool_calls") or ())):
        found += _plain(text, _id_nonce(index), ("id", index)) + _plain(text, _name_nonce(index), ("name", index))
    for index, message in enumerate(new):
        found += _plain(text, _name_nonce(50 + index), ("new_name", index))
        if not (message.get("content") or "").strip():
            continue
        slots = _bodies(text, index, edge)
        if not slots:
            return None
        found += slots
    found.sort(key=lambda entry: entry[0])
    pieces: list[str | Slot] = []
    at = 0
    for begin, end, slot in found:
        if begin < at:
            return None
        pieces += (text[at:begin], slot)
        at = end
    pieces.append(text[at:])
    if any(isinstance(piece, str) and _TAG in piece for piece in pieces):
        return None
    return Frame(tuple(piece for piece in pieces if piece != ""))


def _plain(text: str, nonce: str, source: tuple[str, int]) -> list[tuple[int, int, Slot]]:
    found = []
    begin = text.find(nonce)
    while begin >= 0:
        found.append((begin, begin + len(nonce), Slot(source, str)))
        begin = text.find(nonce, begin + 1)
    return found


def _bodies(text: str, index: int, edge: str) -> list[tuple[int, int, Slot]] | None:
    """Every place of a content's nonce with its transformation; None where one is not understood."""
    original = edge + _body_nonce(index) + edge[::-1]
    shown = [(transform(original), transform) for transform in _TRANSFORMS]
    shown.sort(key=lambda entry: -len(entry[0]))
    found = []
    at = text.find(_body_nonce(index))
    while at >= 0:
        for candidate, transform in shown:
            begin = at - candidate.index(_body_nonce(index))
            if begin >= 0 and text.startswith(candidate, begin):
                found.append((begin, begin + len(candidate), Slot(("content", index), transform)))
                break
        else:
            return None
        at = text.find(_body_nonce(index), at + 1)
    return found
