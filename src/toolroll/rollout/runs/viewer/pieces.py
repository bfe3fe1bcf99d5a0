"""The text of each token of a sequence, for the display.

The text of one token is its piece. Invariant: the joined pieces of a sequence are its text. If a
character consists of several tokens, the piece of the last of these tokens is the whole character,
and the pieces of the others are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"
_LONGEST = 8  # maximum tokens of one character: 4 bytes in UTF-8, and joined emoji


class Pieces:
    """The pieces of the tokens of `tokenizer`. Each id is decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the piece of each token in `ids`."""
        found: list[str] = []
        waiting: list[int] = []
        for index in ids:
            alone = self._alone(int(index))
            if not waiting and _BROKEN not in alone:
                found.append(alone)
                continue
            waiting.append(int(index))
            text = self._decode(waiting)
            if _BROKEN in text and len(waiting) < _LONGEST:
                found.append("")
                continue
            found.append(text)
            waiting.clear()
        if waiting:
            found[-1] = self._decode(waiting)
        return found

    def _alone(self, index: int) -> str:
        if index not in self._known:
            text = self._decode([index])
            token = self._tokenizer.convert_ids_to_tokens(index)
            if isinstance(token, str) and token.startswith("▁") and not text.startswith(" "):
                text = " " + text  # SentencePiece drops the space of a first word
            self._known[index] = text
        return self._known[index]

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
