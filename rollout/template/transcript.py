"""Recorded conversations as tokens, by diffing successive renders.

For SFT and for replaying transcripts: the tokens were never sampled here, so the trajectory says `source="transcript"` and RL
adapters refuse it (I3). Invariants: the concatenated pieces are exactly the render of the whole conversation; the generation
prompt before an assistant message is there and masked 0; consecutive tool messages are one piece (Qwen groups them in one block);
a template that rewrites an earlier message raises instead of giving a wrong slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.types import Message, Tool, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of a transcript: what one message, or one run of tool messages, added; `mask` is 1 for the assistant's
    own text, its stop token included."""

    start: int
    stop: int
    mask: int
    roles: tuple[str, ...]


def tokenize_conversation(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None = None
) -> tuple[Trajectory, tuple[Piece, ...]]:
    """The tokens of a recorded conversation and where each message stands.

    Raises `HistoryRewrittenError` where a later message changes how an earlier one renders.
    """
    ids: list[int] = []
    mask: list[int] = []
    pieces: list[Piece] = []
    for text, trained, roles in _pieces(template, messages, tools):
        piece = template.encoder.encode(text)
        pieces.append(Piece(len(ids), len(ids) + len(piece), int(trained), roles))
        ids += piece
        mask += [int(trained)] * len(piece)
    turns = tuple(Turn(piece.start, piece.stop, "stop") for piece in pieces if piece.mask)
    trajectory = Trajectory(
        np.array(ids, dtype=np.int32),
        np.array(mask, dtype=np.uint8),
        np.full(len(ids), np.nan, dtype=np.float32),
        turns,
        turns[0].start if turns else len(ids),
        source="transcript",
    )
    return trajectory, tuple(pieces)


def last_message_delta(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None = None
) -> tuple[list[int], list[int]]:
    """The ids and the loss mask that the last message (or the last run of tool messages) adds to the conversation before it."""
    before = _before_last(messages)
    ids: list[int] = []
    mask: list[int] = []
    for text, trained, _ in _added(template, messages[:before], messages[before:], tools):
        piece = template.encoder.encode(text)
        ids += piece
        mask += [int(trained)] * len(piece)
    return ids, mask


def _before_last(messages: Sequence[Message]) -> int:
    """How many messages stand before the last one, or before the run of tool messages at the end."""
    before = len(messages) - 1
    while before > 0 and messages[before].get("role") == "tool" and messages[before - 1].get("role") == "tool":
        before -= 1
    return before


def _pieces(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None
) -> list[tuple[str, bool, tuple[str, ...]]]:
    found: list[tuple[str, bool, tuple[str, ...]]] = []
    begin = next((at for at, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    if begin:
        found.append((template.renderer.render(messages[:begin], tools, generate=False), False, _roles(messages[:begin])))
    while begin < len(messages):
        end = begin + 1
        while end < len(messages) and messages[end].get("role") == messages[begin].get("role") == "tool":
            end += 1
        found += _added(template, messages[:begin], messages[begin:end], tools)
        begin = end
    return [piece for piece in found if piece[0]]


def _added(
    template: ChatTemplate, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool] | None
) -> list[tuple[str, bool, tuple[str, ...]]]:
    """The text that `new` adds behind `before`: for an assistant message the generation prompt, its own text up to the stop
    token, and the rest of the turn close; for others one piece."""
    render = template.renderer.render
    prior = render(before, tools, generate=False) if before else ""
    whole = render([*before, *new], tools, generate=False)
    roles = _roles(new)
    if not whole.startswith(prior):
        raise HistoryRewrittenError(f"message {len(before)} ({roles[0]}) changes how the messages before it are rendered")
    if new[0].get("role") != "assistant":
        return [(whole[len(prior) :], False, roles)]
    prompted = render(before, tools, generate=True)
    if not (prompted.startswith(prior) and whole.startswith(prompted)):
        raise HistoryRewrittenError(f"message {len(before)} (assistant) does not begin with the generation prompt")
    said = whole[len(prompted) :]
    stops = [said.rfind(stop) + len(stop) for stop in template.stop_texts if stop in said]
    cut = max(stops, default=len(said))
    return [(prompted[len(prior) :], False, roles), (said[:cut], True, roles), (said[cut:], False, roles)]


def _roles(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(str(message.get("role")) for message in messages)
