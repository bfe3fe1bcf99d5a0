"""`ServedSequence`: a sequence of an episode as it was served and sampled, for `Verifier`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolroll.rollout.media import Image
from toolroll.rollout.template.record import AnswerRecord
from toolroll.rollout.types import IdArray, Message, Tool


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """A sampled turn: its token range `[start, stop)` in the sequence, and its message's index.

    `stopped`: True if the turn ended with a stop token, False if it was truncated (even if its last
    token is a stop token). `prefill`: the text that the model was given to continue. Its token
    range is `[start, sampled_from)`.
    """

    start: int
    stop: int
    message: int
    stopped: bool = True
    prefill: str = ""
    sampled_from: int = 0


@dataclass(frozen=True, slots=True)
class ServedSequence:
    """One sequence as it was served and sampled, up to its last sampled turn.

    `turns` are the sampled turns, oldest first. The tokens before the first turn are the prompt.
    `messages` and `tools` are the conversation's. `forked`: the prompt contains tokens that were
    sampled in earlier turns. `preserved`: the template rewrites part of the sequence, and
    history="preserve" kept this part. `record`: the engine's answers of the session. `dropped`: the
    number of ids that were removed from the start of the prompt before the engine got it.
    `images`: the images in `input_ids`.
    """

    input_ids: IdArray
    turns: tuple[TurnSpan, ...]
    messages: Sequence[Message]
    tools: Sequence[Tool]
    forked: bool = False
    preserved: bool = False
    record: AnswerRecord | None = None
    dropped: int = 0
    images: Sequence[Image] = ()

    def sampled_spans(self) -> list[tuple[int, int]]:
        """Return the range of each turn's sampled ids, counted without the dropped ids."""
        cut = self.dropped
        return [(max(t.start, t.sampled_from) - cut, t.stop - cut) for t in self.turns]
