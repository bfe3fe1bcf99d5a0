"""`TurnNode`: one turn of a conversation. A turn is a sampled reply with the messages that its
request added to the conversation.

Invariants: the conversation of a turn never changes after the turn is created. A turn holds only
the messages that it added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from toolroll.rollout.server.conversation.messages import Digest, same_reasoning
from toolroll.rollout.session.session import Session
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.delta import SampledText
from toolroll.rollout.template.record import AnswerRecord
from toolroll.rollout.template.verify import ServedSequence, TurnSpan
from toolroll.rollout.types import IdArray, Message


@dataclass(slots=True, eq=False, kw_only=True)
class TurnNode:
    """One turn: the messages that its request added, the reply and its node in the session's tree,
    and the tools and the template of its prompt.
    """

    parent: TurnNode | None
    added: tuple[Message, ...]
    reply: Message
    digest: Digest
    node: Node
    sampled: SampledText
    tools_key: bytes
    template: ChatTemplate
    continues: bool = False
    """True if its tokens directly follow the tokens of `parent`."""
    preserved: bool = False
    """True if its prompt keeps tokens that the template would have rewritten."""
    dropped: IdArray | None = None
    """The ids that were removed from the start of its prompt. The model did not get them."""
    prefill: str = ""
    prefill_size: int = 0
    """The start of the reply, if the client gave it to the model: its text and its number of
    tokens. These tokens are before `node`, in the prompt.
    """
    checked: bool = False
    """True if the sequence that ends with this turn was verified."""

    def messages(self) -> list[Message]:
        """Return the conversation up to and including the reply, as it was served."""
        turns: list[TurnNode] = []
        turn: TurnNode | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return [message for step in reversed(turns) for message in (*step.added, step.reply)]

    def keeps_reasoning(self, messages: Sequence[Message], length: int) -> bool:
        """Return True if the first `length` of `messages` repeat the reasoning of this turn's
        conversation unchanged, or omit it. Return False if they change it.
        """
        turn: TurnNode | None = self
        while turn is not None:
            start = length - len(turn.added) - 1
            if not all(map(same_reasoning, messages[start:length], (*turn.added, turn.reply))):
                return False
            turn, length = turn.parent, start
        return True


def sequence_of(last: TurnNode, session: Session, record: AnswerRecord) -> ServedSequence:
    """Return the token sequence that ends with `last`, in the form that `Verifier.check` needs."""
    chain = [last]
    while chain[-1].continues and chain[-1].parent is not None:
        chain.append(chain[-1].parent)
    messages = last.messages()
    end = len(messages)
    spans: list[TurnSpan] = []
    # A first prompt that was truncated is verified together with the ids that it lost.
    dropped = chain[-1].dropped
    ids = session.path_ids(last.node)
    shift = 0 if dropped is None else len(dropped)
    for turn in chain:
        stopped = turn.sampled.stop is not None
        start, stop = turn.node.start + shift, turn.node.stop + shift
        begin = start - turn.prefill_size
        spans.append(TurnSpan(begin, stop, end - 1, stopped, turn.prefill, start))
        end -= len(turn.added) + 1
    return ServedSequence(
        np.concatenate([dropped, ids]) if dropped is not None else ids,
        tuple(reversed(spans)),
        messages,
        orjson.loads(last.tools_key) or [],
        forked=chain[-1].parent is not None,
        preserved=any(turn.preserved for turn in chain),
        record=record,
        dropped=shift,
    )
