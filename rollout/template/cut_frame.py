"""`CutFrame`: a learned frame whose fixed parts are ids already, so that a delta encodes little more than the new bodies.

Invariants: a frame is cut only where one of the template's own control tokens begins, which no BPE merge crosses; a body that
holds the text of a control token is encoded in the whole text, as plain text (I6).
"""

from __future__ import annotations

from collections.abc import Sequence

from toolroll.rollout.template.encode import Encoder, Span, as_bytes, from_bytes
from toolroll.rollout.template.frames import Frame, Slot, source_text
from toolroll.rollout.types import IdArray, Message


class CutFrame:
    """`frame`, cut for `encoder`. With `whole`, nothing is cut: for a tokenizer that encodes a part otherwise than the whole."""

    def __init__(self, frame: Frame, encoder: Encoder, *, whole: bool = False) -> None:
        self.frame = frame
        self.uses = 0
        """How many deltas it has made."""
        self._encoder = encoder
        self._parts: list[bytes | tuple[str | Slot, ...]] = []
        for chunk in [frame.pieces] if whole else _chunks(frame, encoder):
            fixed = "".join(piece for piece in chunk if isinstance(piece, str))
            if any(isinstance(piece, Slot) for piece in chunk):
                self._parts.append(chunk)
            elif self._parts and isinstance(self._parts[-1], bytes):
                self._parts[-1] += as_bytes(encoder.encode(fixed))
            else:
                self._parts.append(as_bytes(encoder.encode(fixed)))

    def ids(self, turn: Message, new: Sequence[Message]) -> IdArray:
        """The ids to append for these messages."""
        ids: list[bytes] = []
        for part in self._parts:
            if isinstance(part, bytes):
                ids.append(part)
                continue
            texts = []
            for piece in part:
                if isinstance(piece, str):
                    texts.append(piece)
                    continue
                text = piece.transform(source_text(piece.source, turn, new))
                if self._encoder.holds_control(text):
                    return self._whole(turn, new)
                texts.append(text)
            ids.append(self._encoder.encode_bytes("".join(texts)))
        return from_bytes(b"".join(ids))

    def _whole(self, turn: Message, new: Sequence[Message]) -> IdArray:
        text, bodies = self.frame.fill(turn, new)
        return self._encoder.encode_known(text, risky(self._encoder, text, bodies))


def risky(encoder: Encoder, text: str, bodies: Sequence[Span]) -> list[Span]:
    """Those of `bodies` that hold the text of a control token."""
    return [span for span in bodies if encoder.holds_control(text[span[0] : span[1]])]


def _chunks(frame: Frame, encoder: Encoder) -> list[tuple[str | Slot, ...]]:
    """The pieces of `frame`, grouped: each group but the first begins with a control token."""
    chunks: list[list[str | Slot]] = [[]]
    for piece in frame.pieces:
        if isinstance(piece, Slot):
            chunks[-1].append(piece)
            continue
        cuts = [match.start() for match in encoder.pattern.finditer(piece) if not encoder.eats_left(match.group())]
        for begin, end in zip([0, *cuts], [*cuts, len(piece)], strict=True):
            if begin in cuts and chunks[-1]:
                chunks.append([])
            if begin < end:
                chunks[-1].append(piece[begin:end])
    return [tuple(chunk) for chunk in chunks if chunk]
